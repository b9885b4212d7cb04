"""Files that break: a layer below SQLite that fails the n-th read, write, sync or truncate, as disks do.

While its block lasts, every SQLite connection of this process goes through it, also those of a store::

    with FaultyFiles() as files:
        files.plan(FileFault("io error", operation="sync", at=3))
        …
        assert files.fired

Looping over ``at`` until a run is through without the fault having fired tries every point without listing them.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

import apsw

Operation = Literal["read", "write", "sync", "truncate", "lock"]

_CODES = {
    "read": apsw.SQLITE_IOERR_READ,
    "write": apsw.SQLITE_IOERR_WRITE,
    "sync": apsw.SQLITE_IOERR_FSYNC,
    "truncate": apsw.SQLITE_IOERR_TRUNCATE,
    "lock": apsw.SQLITE_IOERR_LOCK,
}


@dataclass(frozen=True, slots=True)
class FileFault:
    """What happens to one call, and to all later ones if it is ``lasting``.

    ``io error``, ``full``, ``busy``: it fails and does nothing.  ``torn``: a write fails after half of it was done.
    ``kill``: the process dies there, and a write is done by half.
    """

    kind: Literal["io error", "full", "busy", "torn", "kill"]
    operation: Operation | None = None
    #: Which call, counted from 1: of this operation, or of any.
    at: int = 1
    lasting: bool = False


class FaultyFiles(apsw.VFS):
    """SQLite's way to its files for as long as the block lasts; close every connection before it ends.

    ``durable=False`` counts syncs and does not wait for the disk: faster, and only a power failure could tell.
    ``base`` names the layer below: SQLite's ``unix-dotfile``, for instance, has no memory that processes share, like
    many network file systems.
    """

    def __init__(self, *, durable: bool = True, base: str | None = None) -> None:
        self._base = base or apsw.vfs_names()[0]
        self.durable = durable
        self._counting = threading.Lock()
        self._fault: FileFault | None = None
        #: How often each operation was asked for since the plan was made.
        self.calls: Counter[str] = Counter()
        #: How many calls failed since the plan was made.
        self.fired = 0
        #: How many databases were opened, one for each connection.
        self.opened = 0
        super().__init__("onefold-faulty", self._base, makedefault=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.unregister()

    def plan(self, fault: FileFault | None) -> None:
        """From now on let this happen, and count anew."""
        with self._counting:
            self._fault = fault
            self.calls.clear()
            self.fired = 0

    def heal(self) -> None:
        """Let everything work again; what was counted stays."""
        self._fault = None

    def hit(self, operation: Operation) -> FileFault | None:
        """Count one call and return the fault that befalls it."""
        with self._counting:
            self.calls[operation] += 1
            fault = self._fault
            if fault is None or fault.operation not in (None, operation):
                return None
            number = self.calls.total() if fault.operation is None else self.calls[operation]
            if number < fault.at or (number > fault.at and not fault.lasting):
                return None
            self.fired += 1
            return fault

    def xOpen(self, name: Any, flags: list[int]) -> _File:  # noqa: N802 - SQLite's name
        self.opened += bool(flags[0] & apsw.SQLITE_OPEN_MAIN_DB)
        return _File(self, self._base, name, flags)

    def excepthook(self, *_: Any) -> bool:
        """Say nothing: whoever made the call gets the error."""
        return True


class _File(apsw.VFSFile):
    def __init__(self, files: FaultyFiles, base: str, name: Any, flags: list[int]) -> None:
        self._files = files
        super().__init__(base, name, flags)

    def excepthook(self, *_: Any) -> bool:
        """Say nothing: whoever made the call gets the error."""
        return True

    def xRead(self, amount: int, offset: int) -> bytes:  # noqa: N802
        _suffer(self._files.hit("read"), "read")
        return super().xRead(amount, offset)

    def xWrite(self, data: Any, offset: int) -> None:  # noqa: N802
        fault = self._files.hit("write")
        if fault is not None and fault.kind in ("torn", "kill"):
            super().xWrite(bytes(data)[: len(data) // 2], offset)
        _suffer(fault, "write")
        super().xWrite(data, offset)

    def xSync(self, flags: int) -> None:  # noqa: N802
        _suffer(self._files.hit("sync"), "sync")
        if self._files.durable:
            super().xSync(flags)

    def xTruncate(self, size: int) -> None:  # noqa: N802
        _suffer(self._files.hit("truncate"), "truncate")
        super().xTruncate(size)

    def xLock(self, level: int) -> None:  # noqa: N802
        _suffer(self._files.hit("lock"), "lock")
        super().xLock(level)


def _suffer(fault: FileFault | None, operation: Operation) -> None:
    if fault is None:
        return
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    codes = {"full": apsw.SQLITE_FULL, "busy": apsw.SQLITE_BUSY}
    raise apsw.exception_for(codes.get(fault.kind, _CODES[operation]))
