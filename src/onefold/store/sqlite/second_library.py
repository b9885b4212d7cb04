"""One file, one library: a second SQLite library of this process is kept away from a file that a store has open.

SQLite's locks are POSIX locks, which belong to the process and not to the descriptor: when a second library closes its
own descriptor of the file, the first one's locks are gone, and each takes itself for the only one that writes.
Files are known by device and inode, so that links and other spellings of a name do not matter.
Whatever slips through shows at the next commit: the file, or its log, is not the one that was opened any more.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
from typing import Any
from urllib.parse import unquote
from weakref import WeakValueDictionary

import apsw

from onefold.errors import ConfigurationError, SecondLibraryError, StoreReplacedError, StoreUnavailableError
from onefold.store.sqlite.drivers import Library

Identity = tuple[int, int]

_DESCRIPTORS = "/proc/self/fd"
_REMEDY = (
    'use App(url, driver="sqlite3"), or ?driver=sqlite3 in the URL, so that the store runs on the interpreter\'s '
    "sqlite3 module as well"
)


class FileHold:
    """That stores of this process have a file open, with this library; over when the last released it or is gone."""

    __slots__ = ("__weakref__", "identity", "library", "path", "stores")

    def __init__(self, path: str, identity: Identity, library: Library) -> None:
        self.path = path
        self.identity = identity
        self.library = library
        self.stores = 0

    def release(self) -> None:
        """Count one store less; the file is free after the last."""
        with _lock:
            self.stores -= 1
            if self.stores <= 0 and _holds.get(self.identity) is self:
                del _holds[self.identity]


_holds: WeakValueDictionary[Identity, FileHold] = WeakValueDictionary()
#: Held while a file is created or admitted, so that no store connects to it meanwhile.
_lock = threading.Lock()
_hooked = False


def hold(path: str, library: Library) -> FileHold:
    """Create the file if need be, private to its owner, and keep other libraries of this process away from it.

    Raises ``SecondLibraryError`` if one of them has it open already.
    """
    with _lock:
        _create(path)
        identity = _identity(path)
        if identity is None:
            raise StoreUnavailableError(f"{path} was removed the moment it was created; trying again is safe")
        held = _holds.get(identity)
        if held is None or held.library != library:
            _refuse_others(path, identity, library, held)
            if library == "apsw":
                _install_hook()
            held = _holds[identity] = FileHold(path, identity, library)
        held.stores += 1
        return held


def _create(path: str) -> None:
    """Make an empty file that only its owner may read; SQLite gives the files beside it the same rights."""
    try:
        made = os.open(os.path.realpath(path), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    except FileExistsError:
        return
    except OSError as error:
        wrong = f"{path} cannot be created: {error.strerror}"
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise ConfigurationError(f"{wrong}; the directory must be writable too, for the files beside it") from error
        raise StoreUnavailableError(wrong) from error
    # Nothing is locked yet in a file that did not exist, so closing it drops nothing.
    os.close(made)


def _identity(path: str | bytes) -> Identity | None:
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return (found.st_dev, found.st_ino)


def _refuse_others(path: str, identity: Identity, library: Library, held: FileHold | None) -> None:
    if held is not None:
        raise SecondLibraryError(
            f"{path}: a store of this process has this file open with driver={held.library!r}; two SQLite libraries on "
            f"one file in one process damage it: open it with driver={held.library!r} here too"
        )
    ours = any(_may_have(one, identity) for one in apsw.connections())
    if library == "sqlite3" and ours:
        raise SecondLibraryError(
            f"{path}: apsw has this file open in this process; two SQLite libraries on one file in one process damage "
            'it: close that connection first, or use driver="apsw"'
        )
    if library == "apsw" and not ours and _has_descriptor(identity):
        raise SecondLibraryError(
            f"{path}: something in this process has this file open already, most likely the sqlite3 module, through an "
            "ORM or a script; two SQLite libraries on one file in one process damage it: close it first, or " + _REMEDY
        )


def _may_have(connection: apsw.Connection, identity: Identity) -> bool:
    try:
        return _identity(connection.filename) == identity
    except apsw.ConnectionClosedError:
        return False
    except apsw.Error:
        return True  # another thread uses it, so it does not say


def _has_descriptor(identity: Identity) -> bool:
    """Whether this process has the file open; False where the system does not tell."""
    try:
        descriptors = os.listdir(_DESCRIPTORS)
    except OSError:
        return False
    return any(_identity(f"{_DESCRIPTORS}/{number}") == identity for number in descriptors)


# the hook


def _install_hook() -> None:
    global _hooked
    if not _hooked:
        _hooked = True
        sys.addaudithook(_watch)


def _begin_child() -> None:
    """A child has no locks to lose and cannot use its parent's stores; nor has it the thread that may hold our lock."""
    global _lock
    _lock = threading.Lock()
    _holds.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_child)


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "sqlite3.connect" and _holds:
        _refuse_connection(arguments[0])


def _refuse_connection(database: Any) -> None:
    try:
        name = os.fspath(database)
    except TypeError:
        return  # sqlite3 will say so
    for spelling in (name, _of_uri(name)):
        identity = _identity(spelling) if spelling else None
        held = _holds.get(identity) if identity is not None else None
        if held is not None and held.library == "apsw":
            raise SecondLibraryError(
                f"{held.path}: a onefold store of this process has this file open with a SQLite library of its own "
                "(apsw); a second one, sqlite3, on one file in one process damages it and loses messages: " + _REMEDY
            )


def _of_uri(name: str | bytes) -> str:
    """Return the path that a ``file:`` URI names, as SQLite reads it."""
    text = os.fsdecode(name)
    if not text.startswith("file:"):
        return ""
    path = text.removeprefix("file:").split("?")[0].split("#")[0]
    if path.startswith("//"):
        path = "/" + path[2:].partition("/")[2]
    return unquote(path)


# the files themselves


class Files:
    """The file and its log by inode, compared before a commit is answered."""

    __slots__ = ("_log", "_log_identity", "_path", "_path_identity", "_replaced")

    def __init__(self, path: str, identity: Identity) -> None:
        self._path = path
        self._path_identity = identity
        # SQLite follows links and puts the log beside the file itself.
        self._log = f"{os.path.realpath(path)}-wal"
        self._log_identity: Identity | None = None
        #: The file that is not ours any more.
        self._replaced = ""

    def note_log(self) -> None:
        """Take the log that is there for ours: right after connecting, when SQLite has made or opened it.

        There is none with a rollback journal.
        """
        self._log_identity = _identity(self._log)

    def check(self) -> None:
        """Raise if a name leads to another file, or to none: what was committed is not where it will be looked for."""
        if not self._replaced:
            if _identity(self._path) != self._path_identity:
                self._replaced = self._path
            elif self._log_identity is not None and _identity(self._log) != self._log_identity:
                self._replaced = self._log
        self.refuse_replaced()

    def refuse_replaced(self) -> None:
        """Raise if a check has found that."""
        if self._replaced:
            raise StoreReplacedError(
                f"{self._path}: {self._replaced} is not the file any more that this process opened; it was moved, "
                "removed, replaced by a copy, or opened by a second SQLite library.  What was written last may be "
                "lost, and nothing more is accepted: stop everything that uses the file, put the right one in its "
                "place, then start again"
            )
