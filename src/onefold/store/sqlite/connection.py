"""Opening a SQLite file with the settings the promise rests on, and what its errors mean."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from onefold.clock import MICROSECONDS, SystemClock, pause, system_random
from onefold.errors import ConfigurationError, SchemaError, StoreError, StoreUnavailableError
from onefold.store.shared.rows import UNREADABLE
from onefold.store.sqlite.drivers import (
    BUSY,
    CANTOPEN,
    CORRUPT,
    ERRORS,
    FULL,
    IOERR,
    LOCKED,
    NOMEM,
    NOTADB,
    READONLY,
    Connection,
    Driver,
    Journal,
    Trace,
    is_busy,
    result_of,
)
from onefold.store.sqlite.schema import MIGRATIONS, missing_migrations

#: Wait this long for the write lock of another process: longer than any handler's transaction may last, and as long as
#: Python's own driver does.
BUSY_SECONDS_MAX = 5.0
#: The write-ahead log keeps this length at most once it is copied: four times what it has between two copies, because
#: commits are slower while it grows, and no more, because it lies on the disk for as long as the file is open.
LOG_BYTES_MAX = 16 * 1_048_576
#: Others hold the write lock for a millisecond or so, and leave it alone for one when their turn is over: look again
#: after the first figure, then later up to the second, give or take half of it, so that waiting processes do not look
#: at the same moment.
_BUSY_PAUSE_SECONDS, _BUSY_PAUSE_SECONDS_MAX = 0.0005, 0.001

#: How long a lock is waited for is a matter of real time, whatever clock a test has.
_machine = SystemClock()

#: All that ``translated`` has a meaning for; SQLite has no checksums, so damage may show only when a row is read.
TRANSLATED: tuple[type[Exception], ...] = (*ERRORS, *UNREADABLE)


class Patience:
    """Waiting for another process's write lock: bounded, a little random, and never where it would block a loop."""

    def __init__(self, *, allowed: bool) -> None:
        self.allowed = allowed
        self._waited = 0.0
        self._chance = system_random()

    def __call__(self, looks: int) -> bool:
        if not self.allowed:
            return False
        self._waited = self._waited if looks else 0.0
        seconds = min(_BUSY_PAUSE_SECONDS * (1 + looks / 8), _BUSY_PAUSE_SECONDS_MAX) * self._chance.uniform(0.5, 1.5)
        pause(seconds)
        self._waited += seconds
        return not waited_enough(self._waited)


def waited_enough(seconds: float) -> bool:
    """Whether that was long enough to wait for another process's write lock."""
    return seconds >= BUSY_SECONDS_MAX


@dataclass(frozen=True, slots=True)
class Settings:
    """How every connection of a store is opened."""

    driver: Driver
    path: str
    synchronous: str = "FULL"
    #: None keeps what the file has if onefold made it, and means the write-ahead log for a new one.
    journal: Journal | None = None
    trace: Trace | None = None

    @property
    def in_memory(self) -> bool:
        return self.path == ":memory:"


def open_connection(settings: Settings, patience: Patience) -> Connection:
    """Open the file with the settings the promise rests on, and read them back.

    Raises ``SchemaError`` for a file that is not a sound SQLite database; nothing is ever written over one.
    """
    try:
        wait_seconds = BUSY_SECONDS_MAX if patience.allowed else 0
        connection = settings.driver.connect(settings.path, trace=settings.trace, wait_seconds=wait_seconds)
        try:
            _set_up(connection, settings, patience)
        except BaseException:
            connection.close(True)
            raise
    except ERRORS as error:
        raise translated(error, settings.path) from error
    return connection


def _set_up(connection: Connection, settings: Settings, patience: Patience) -> None:
    connection.wait_with(patience)
    connection.execute("SELECT count(*) FROM sqlite_schema").fetchall()
    # A database that is not ours is refused before anything about it is changed.
    is_ours = len(missing_migrations(connection)) < len(MIGRATIONS)
    synchronous = settings.synchronous
    if not settings.in_memory:
        journal = settings.journal or ("delete" if is_ours and connection.pragma("journal_mode") == "delete" else "wal")
        _choose_journal(connection, settings.path, journal, patience)
        if journal == "delete" and synchronous == "FULL":
            # A commit removes the journal; only EXTRA also syncs the directory that it was removed from.
            synchronous = "EXTRA"
    connection.execute(f"PRAGMA synchronous = {synchronous}")
    connection.execute("PRAGMA foreign_keys = ON")
    # The first commit after the log began anew cuts off what is longer.
    connection.execute(f"PRAGMA journal_size_limit = {LOG_BYTES_MAX}")
    # With the cache at 64 MB a claim of a thousand messages stays in memory.
    connection.execute("PRAGMA cache_size = -65536")
    # The log is made by the first transaction that needs it; afterwards it is known which file it is.
    connection.execute("SELECT count(*) FROM sqlite_schema").fetchall()


def _choose_journal(connection: Connection, path: str, journal: Journal, patience: Patience) -> None:
    """Set the journal, waiting: SQLite itself fails without waiting when several processes do so at one moment."""
    give_up_at = _machine.steady() + round(BUSY_SECONDS_MAX * MICROSECONDS)
    while True:
        try:
            connection.execute(f"PRAGMA journal_mode = {journal}").fetchall()
            break
        except ERRORS as error:
            if is_busy(error) and journal == "delete" and connection.pragma("journal_mode") == "wal":
                raise ConfigurationError(
                    f"{path}: it has a write-ahead log that other connections use, so journal='delete' cannot be set; "
                    "stop everything that has the file open, then start again"
                ) from error
            # SQLite may have asked to wait as well, so that how often it was asked says nothing.
            if not is_busy(error) or not patience(0) or _machine.steady() >= give_up_at:
                raise
    if connection.pragma("journal_mode") != journal:
        wanted = "turn on write-ahead logging" if journal == "wal" else "use a rollback journal"
        raise ConfigurationError(f"{path}: SQLite could not {wanted} here; use another file system")


def is_unreadable(error: BaseException) -> bool:
    """Whether a row was read that is damaged."""
    # The interpreter's module has neither a class nor a result code for this.
    undecodable = isinstance(error, ERRORS) and str(error).startswith("Could not decode to UTF-8")
    return undecodable or isinstance(error, UNREADABLE)


def translated(error: Exception, path: str) -> Exception:
    """Return the error of ours that says what a failure of SQLite means for the caller."""
    if is_unreadable(error):
        return damaged(path)
    result = result_of(error)
    if result in (BUSY, LOCKED):
        return StoreUnavailableError(f"{path}: another process held the write lock for too long; nothing was written")
    if result == FULL:
        return StoreUnavailableError(f"{path}: the disk is full; nothing was written.  Free space, then try again")
    if result in (IOERR, CANTOPEN, NOMEM):
        return StoreUnavailableError(f"{path}: {error}; nothing was half-written, trying again is safe")
    if result == READONLY:
        return StoreError(f"{path}: the file or its directory is read-only")
    if result in (CORRUPT, NOTADB):
        return damaged(path)
    if isinstance(error, ERRORS):
        return StoreError(f"{path}: {error}")
    return error


#: On these file systems locks or shared memory do not work between machines, and the file would be damaged.
_NETWORK_FILE_SYSTEMS = {
    "9p", "afs", "ceph", "cifs", "fuse.glusterfs", "fuse.sshfs", "glusterfs", "lustre", "ncpfs", "nfs", "nfs4",
    "smb2", "smb3", "smbfs",
}  # fmt: skip
#: The smallest page; SQLite would take a file of one byte for an empty one, and write over it.
_DATABASE_BYTES_MIN = 512
#: Directories whose file system is remembered; a process opens few.
_DIRECTORIES_MAX = 64


def refuse_unsafe_file(path: str, mounts: str | None = None) -> None:
    """Refuse a file that SQLite must not be let loose on."""
    file = Path(path)
    try:
        file.stat()
    except PermissionError as error:
        raise ConfigurationError(
            f"{path} cannot be reached: {error.strerror}; let the user of this process search its directories"
        ) from error
    except OSError:
        pass  # it is to be created, or what is wrong with its directory is told below
    if file.is_dir():
        raise ConfigurationError(f"{path} is a directory; name a file in it")
    if not file.parent.is_dir():
        raise ConfigurationError(f"{path}: the directory {file.parent} does not exist; create it first")
    directory = file.parent.resolve()
    kind = _remembered(directory, directory.stat().st_dev) if mounts is None else _file_system(directory, mounts)
    if kind in _NETWORK_FILE_SYSTEMS:
        raise ConfigurationError(
            f"{path} is on a network file system ({kind}), where SQLite's locks do not hold; "
            "use a local disk, or PostgreSQL for several machines"
        )
    if file.exists():
        _refuse_damaged(file)


def damaged(path: str) -> SchemaError:
    """Say that a file is not a database, and what to do."""
    return SchemaError(
        f"{path} is not a sound SQLite database; nothing was written to it.  Move it away and restore a backup, "
        "or save what can be read with `sqlite3 FILE .recover`"
    )


def _refuse_damaged(file: Path) -> None:
    """Look without opening: a descriptor of ours that is closed would drop the locks of this process's connections.

    Whether it is a database at all is for SQLite to say.
    """
    if not os.access(file, os.R_OK):
        raise ConfigurationError(f"{file} cannot be read; let the user of this process read and write it")
    size = file.stat().st_size
    if 0 < size < _DATABASE_BYTES_MIN:
        raise damaged(str(file))
    wal = Path(f"{os.path.realpath(file)}-wal")
    # SQLite would take it for a new database and remove the log, in which there may be messages.
    if size == 0 and wal.exists() and wal.stat().st_size:
        raise damaged(str(file))


@lru_cache(_DIRECTORIES_MAX)
def _remembered(directory: Path, device: int) -> str:
    """Return the kind of file system, asked once per directory and device: another mount is another device."""
    try:
        mounts = Path("/proc/mounts").read_text()
    except OSError:
        return ""  # not Linux: the kind of file system cannot be told this way
    return _file_system(directory, mounts)


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
