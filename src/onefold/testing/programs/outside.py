"""The provider that generated programs call; its memory outlives every worker.

It recognises calls by their keys, for ever or for a while, and refuses a caller that has been replaced: a process
that was stopped for long calls late, which no library can prevent, but the fence lets the provider see it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec

#: How long the provider of the style ``kept`` promises to know a key, and how much longer it really does, which is
#: more than the clocks of the processes differ.
KEPT_SECONDS = 12 * 3_600.0
_KEPT_LONGER_SECONDS = 2 * 3_600.0

_MICROSECONDS = 1_000_000


class StaleCallerError(Exception):
    """The provider has already been called by a later owner of the run."""


class Deed(msgspec.Struct, frozen=True):
    """One effect, at the provider or in the tables."""

    run: str
    place: str
    op: Literal["do", "undo"]
    #: The decisions that the caller had taken before.
    seen: str
    value: int
    key: str = ""
    fence: int = 0
    at: int = 0
    #: Whether the provider recognised the call, so that nothing happened again.
    again: bool = False


class Outside:
    """The provider, with its memory in this process."""

    def __init__(self) -> None:
        self._deeds: list[Deed] = []
        self._heard: dict[str, int] = {}

    def deeds(self) -> list[Deed]:
        """Return all calls, oldest first."""
        return list(self._deeds)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        yield

    def _remember(self, deed: Deed) -> None:
        self._deeds.append(deed)

    def _hear(self, run: str, fence: int) -> None:
        if fence < self._heard.get(run, 0):
            raise StaleCallerError(f"run {run} has a later owner than fence {fence}")
        self._heard[run] = fence

    def call(self, deed: Deed, *, keeps: float | None = None) -> int:
        """Perform the call, unless one with the same key is remembered; return the value of the first call."""
        with self._alone():
            self._hear(deed.run, deed.fence)
            known = [one for one in self.deeds() if one.key == deed.key and one.op == deed.op] if deed.key else []
            if keeps is not None:
                known = [one for one in known if deed.at - one.at < (keeps + _KEPT_LONGER_SECONDS) * _MICROSECONDS]
            if known:
                deed = msgspec.structs.replace(deed, value=known[0].value, again=True)
            self._remember(deed)
            return deed.value

    def find(self, run: str, place: str, fence: int) -> int | None:
        """Return the value of a call, or None if there was none; refuses earlier owners from now on."""
        with self._alone():
            self._hear(run, fence)
            found = [one.value for one in self.deeds() if (one.run, one.place, one.op) == (run, place, "do")]
            return found[0] if found else None


class OutsideFile(Outside):
    """The same with its memory in a file, shared by several processes, each of which may be killed at any moment."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    @contextmanager
    def _alone(self) -> Iterator[None]:
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            self._read()
            self._file = file
            yield
        finally:
            os.close(file)

    def _read(self) -> None:
        self._deeds, self._heard = [], {}
        for line in self._path.read_bytes().splitlines() if self._path.exists() else ():
            entry = msgspec.json.decode(line)
            if isinstance(entry, list):
                self._heard[entry[0]] = entry[1]
            else:
                self._deeds.append(msgspec.convert(entry, Deed))

    def deeds(self) -> list[Deed]:
        if not self._deeds:
            self._read()
        return list(self._deeds)

    def _write(self, entry: object) -> None:
        # One system call, so that a kill cannot leave half a line.
        os.write(self._file, msgspec.json.encode(entry) + b"\n")

    def _remember(self, deed: Deed) -> None:
        super()._remember(deed)
        self._write(deed)

    def _hear(self, run: str, fence: int) -> None:
        before = self._heard.get(run)
        super()._hear(run, fence)
        if before != fence:
            self._write([run, fence])
