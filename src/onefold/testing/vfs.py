"""Files that fail: a layer below SQLite that fails the n-th read, write, sync or truncate, as disks do.

For the length of its block, every SQLite connection of this process goes through it, including those of stores::

    with FaultyFiles() as files:
        files.plan(FileFault("io error", operation="sync", at=3))
        …
        assert files.fired

Looping over ``at`` until a run ends without the fault having fired tries every point without listing them.
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
    """One fault, in one call to the disk or, if it is ``lasting``, in all later ones too.

    ``io error``, ``full``, ``busy``: the call fails and does nothing.  ``torn``: a write fails when it is half done.
    ``kill``: the process dies at the call, and a write is half done.
    """

    kind: Literal["io error", "full", "busy", "torn", "kill"]
    operation: Operation | None = None
    #: Which call fails, counted from 1 over the calls of this operation, or of any operation.
    at: int = 1
    lasting: bool = False


class FaultyFiles(apsw.VFS):
    """SQLite's access to its files for the length of the block; close every connection before it ends.

    ``durable=False`` skips the disk at a sync: faster, and the difference shows only in a power failure.
    ``base`` names the layer below: SQLite's ``unix-dotfile``, for instance, has no memory that processes share, like
    many network file systems.
    """

    def __init__(self, *, durable: bool = True, base: str | None = None) -> None:
        self._base = base or apsw.vfs_names()[0]
        self.durable = durable
        self._counting = threading.Lock()
        self._fault: FileFault | None = None
        #: Calls of each operation since the plan was made.
        self.calls: Counter[str] = Counter()
        #: Calls that failed since the plan was made.
        self.fired = 0
        #: Databases opened, one for each connection.
        self.opened = 0
        super().__init__("onefold-faulty", self._base, makedefault=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.unregister()

    def plan(self, fault: FileFault | None) -> None:
        """Plan this fault from now on, and restart the counters."""
        with self._counting:
            self._fault = fault
            self.calls.clear()
            self.fired = 0

    def heal(self) -> None:
        """Let everything work again; the counters stay."""
        self._fault = None

    def hit(self, operation: Operation) -> FileFault | None:
        """Count one call and return its fault, if it has one."""
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
        """Print nothing: the caller gets the error."""
        return True


class _File(apsw.VFSFile):
    def __init__(self, files: FaultyFiles, base: str, name: Any, flags: list[int]) -> None:
        self._files = files
        super().__init__(base, name, flags)

    def excepthook(self, *_: Any) -> bool:
        """Print nothing: the caller gets the error."""
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
