"""Which files SQLite may be let loose on: decided before anything is opened or written."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

from onefold.errors import ConfigurationError, SchemaError

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
