"""Opening a SQLite file safely, and the thread in which its blocking calls run."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal, Protocol, TypeVar

import apsw
import msgspec

from onefold.clock import pause
from onefold.errors import ConfigurationError, SchemaError, StoreError, StoreUnavailableError
from onefold.stores.sqlite.schema import missing_migrations

Answer = TypeVar("Answer")
#: Called before and after every statement, with its text; only tests use it.
Trace = Callable[[Literal["before", "after"], str], None]

#: Other processes hold the write lock for a millisecond or so: look again this often.
_BUSY_PAUSE_SECONDS = 0.0005
#: Ten seconds of looking; after that something is wrong with the other process.
_BUSY_LOOKS = 20_000

#: On these file systems locks or shared memory do not work between machines, and the file would be damaged.
_NETWORK_FILE_SYSTEMS = {
    "9p", "afs", "ceph", "cifs", "fuse.glusterfs", "fuse.sshfs", "glusterfs", "lustre", "ncpfs", "nfs", "nfs4",
    "smb2", "smb3", "smbfs",
}  # fmt: skip

_MAGIC = b"SQLite format 3\0"


def open_connection(
    path: str, *, synchronous: str, trace: Trace | None = None, blocking: bool = True
) -> apsw.Connection:
    """Open the file with the settings the promise rests on, and read them back.

    Raises ``SchemaError`` for a file that is not a sound SQLite database; nothing is ever written over one.
    """
    try:
        connection = apsw.Connection(path)
        if blocking:
            connection.set_busy_handler(_look_again)
        connection.execute("SELECT count(*) FROM sqlite_schema").fetchall()
        # A database that is not ours is refused before anything about it is changed.
        missing_migrations(connection)
        connection.execute("PRAGMA journal_mode = WAL").fetchall()
        connection.execute(f"PRAGMA synchronous = {synchronous}")
        connection.execute("PRAGMA foreign_keys = ON")
        # With the cache at 64 MB a claim of a thousand messages stays in memory.
        connection.execute("PRAGMA cache_size = -65536")
    except (apsw.CorruptError, apsw.NotADBError) as error:
        raise _damaged(path) from error
    except apsw.Error as error:
        raise translated(error, path) from error
    if path != ":memory:" and connection.pragma("journal_mode") != "wal":
        raise ConfigurationError(f"{path}: SQLite could not turn on write-ahead logging here; use another file system")
    if trace is not None:
        _install(connection, trace)
    return connection


def _install(connection: apsw.Connection, trace: Trace) -> None:
    def report(event: dict[str, Any]) -> None:
        trace("before" if event["code"] == apsw.SQLITE_TRACE_STMT else "after", event["sql"])

    connection.trace_v2(apsw.SQLITE_TRACE_STMT | apsw.SQLITE_TRACE_PROFILE, report)


def _look_again(looks: int) -> bool:
    pause(_BUSY_PAUSE_SECONDS)
    return looks < _BUSY_LOOKS


def _damaged(path: str) -> SchemaError:
    return SchemaError(
        f"{path} is not a sound SQLite database; nothing was written to it.  Move it away and restore a backup, "
        "or save what can be read with `sqlite3 FILE .recover`"
    )


def refuse_unsafe_file(path: str, mounts: str | None = None) -> None:
    """Refuse a file that SQLite must not be let loose on."""
    file = Path(path)
    if file.is_dir():
        raise ConfigurationError(f"{path} is a directory; name a file in it")
    if not file.parent.is_dir():
        raise ConfigurationError(f"{path}: the directory {file.parent} does not exist; create it first")
    kind = _file_system(file.parent.resolve(), _mounts() if mounts is None else mounts)
    if kind in _NETWORK_FILE_SYSTEMS:
        raise ConfigurationError(
            f"{path} is on a network file system ({kind}), where SQLite's locks do not hold; "
            "use a local disk, or PostgreSQL for several machines"
        )
    if not file.exists():
        return
    try:
        with file.open("rb") as opened:
            head = opened.read(32)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from error
    wal = Path(f"{path}-wal")
    if head and head[:16] != _MAGIC:
        raise _damaged(path)
    if not head and wal.exists() and wal.stat().st_size:
        raise _damaged(path)


def _mounts() -> str:
    try:
        return Path("/proc/mounts").read_text()
    except OSError:
        return ""  # not Linux: the kind of file system cannot be told this way


def _file_system(directory: Path, mounts: str) -> str:
    best, kind = "", ""
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        point = fields[1].replace("\\040", " ")
        if len(point) >= len(best) and (directory == Path(point) or Path(point) in directory.parents):
            best, kind = point, fields[2]
    return kind


#: What reading a damaged row raises: SQLite has no checksums, so damage may show only there.
UNREADABLE = (UnicodeDecodeError, msgspec.DecodeError)


def translated(error: Exception, path: str) -> Exception:
    """Return the error of ours that says what a failure of SQLite means for the caller."""
    if isinstance(error, UNREADABLE):
        return _damaged(path)
    if isinstance(error, apsw.BusyError | apsw.LockedError):
        return StoreUnavailableError(f"{path}: another process held the write lock for too long; nothing was written")
    if isinstance(error, apsw.FullError):
        return StoreUnavailableError(f"{path}: the disk is full; nothing was written.  Free space, then try again")
    if isinstance(error, apsw.IOError | apsw.CantOpenError):
        return StoreUnavailableError(f"{path}: {error}; nothing was written")
    if isinstance(error, apsw.ReadOnlyError):
        return StoreError(f"{path}: the file or its directory is read-only")
    if isinstance(error, apsw.CorruptError | apsw.NotADBError):
        return _damaged(path)
    return StoreError(f"{path}: {error}")


class Runner(Protocol):
    """Where blocking calls run."""

    async def run(self, function: Callable[..., Answer], *args: Any) -> Answer: ...

    def close(self) -> None: ...


class InlineRunner:
    """Runs calls where they are made: no threads, so that a simulation is the same every time."""

    async def run(self, function: Callable[..., Answer], *args: Any) -> Answer:
        return function(*args)

    def close(self) -> None:
        pass


class ThreadRunner:
    """Runs calls one after the other in a thread of its own, so that a slow disk does not stop the event loop."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...], asyncio.Future[Any]] | None] = SimpleQueue()
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    async def run(self, function: Callable[..., Answer], *args: Any) -> Answer:
        if os.getpid() != self._process:
            raise StoreError("this store was opened before a fork; open one in the child process")
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._jobs.put((function, args, future))
        return await future

    def close(self) -> None:
        """End the thread after what was asked of it is done."""
        self._jobs.put(None)
        if os.getpid() == self._process:
            self._thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            function, args, future = job
            try:
                answer, error = function(*args), None
            except BaseException as raised:
                answer, error = None, raised
            try:
                future.get_loop().call_soon_threadsafe(_answer, future, answer, error)
            except RuntimeError:
                continue  # the event loop was closed; nobody waits for the answer any more
            finally:
                del job, function, args, future, answer, error


def _answer(future: asyncio.Future[Any], answer: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(answer)
    else:
        future.set_exception(error)
