"""Waking the workers that wait on a SQLite file, in this process and in others, without polling in between.

All of it is a hint: a lost one costs at most one polling interval, so nothing that goes wrong here ever fails the
send or the settlement that it was for.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import stat
from itertools import islice

from onefold.clock import SystemClock, system_random

logger = logging.getLogger("onefold")

#: Other processes are woken at most this often: a process that commits faster need not tell them each time.
_RING_SECONDS = 0.001
#: While no other process listens, commits look for listeners only this often.
_LOOK_SECONDS = 0.005


class Notifier:
    """The doorbell of one file."""

    def __init__(self, path: str, *, between_processes: bool) -> None:
        has_sockets = hasattr(socket, "AF_UNIX")
        self._listeners = Listeners(path) if between_processes and has_sockets else None
        self._rung = asyncio.Event()
        self._listening: socket.socket | None = None
        self._pause: asyncio.TimerHandle | None = None
        self._rung_meanwhile = False
        self._told_trouble = False

    async def wait(self, timeout: float) -> None:
        """Return when the bell rings, or after ``timeout`` seconds."""
        if self._listeners is not None and self._listening is None:
            self._listen(self._listeners)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._rung.wait()
        self._rung.clear()

    def ring(self, *, elsewhere: bool = True) -> None:
        """Wake all that wait, here and in other processes, or only those that wait here; never raises."""
        self._rung.set()
        if not elsewhere or self._listeners is None:
            return
        if self._pause is not None:
            self._rung_meanwhile = True
            return
        pause = _RING_SECONDS if self._ring_others(self._listeners) else _LOOK_SECONDS
        self._pause = asyncio.get_running_loop().call_later(pause, self._end_pause)

    def close(self) -> None:
        """Stop listening; calling it twice is harmless."""
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        if self._listening is not None:
            with contextlib.suppress(RuntimeError):
                asyncio.get_running_loop().remove_reader(self._listening)
            self._listening.close()
            self._listening = None
        if self._listeners is not None:
            if self._rung_meanwhile:
                self._ring_others(self._listeners)
            self._listeners.close()

    def _end_pause(self) -> None:
        self._pause = None
        if self._rung_meanwhile:
            self._rung_meanwhile = False
            self.ring()

    def _listen(self, listeners: Listeners) -> None:
        """Listen to other processes; where that is not possible polling must do, and the next wait tries again."""
        listening: socket.socket | None = None
        try:
            listening = listeners.listen()
            asyncio.get_running_loop().add_reader(listening, self._heard, listening)
        except (OSError, NotImplementedError) as error:
            if listening is not None:
                listening.close()
            listeners.close()
            self._tell_trouble(listeners, error)
        else:
            self._listening = listening

    def _heard(self, listening: socket.socket) -> None:
        self._rung.set()
        with contextlib.suppress(OSError):
            # The rest is read at the next turn of the loop.
            for _ in range(LISTENERS_MAX):
                listening.recv(64)

    def _ring_others(self, listeners: Listeners) -> bool:
        """Notify other processes, and say whether one listens."""
        try:
            return listeners.notify()
        except OSError as error:
            self._tell_trouble(listeners, error)
            return False

    def _tell_trouble(self, listeners: Listeners, error: Exception) -> None:
        if not self._told_trouble:
            self._told_trouble = True
            logger.warning("wake_ups_off directory=%s error=%s workers poll instead", listeners.directory, error)


#: Entries of the directory that are looked at: more processes than wait on one file, few enough to be listed in a
#: millisecond on the event loop, however many files another process has put there.
LISTENERS_MAX = 256
#: File systems date a change of a directory with the kernel's last tick, some milliseconds ago: a list made this soon
#: after the last change may lack a socket that the same date covers.
_TICK_MICROS = 20_000
#: The last listener removes the directory, perhaps while the next one is about to bind in it.
_BIND_TRIES = 3
#: Through a descriptor a path has any length and always leads to the directory that was checked.
_DESCRIPTORS = "/proc/self/fd"
_GROUP_WRITES, _OTHERS_WRITE = stat.S_IWGRP, stat.S_IWOTH
_machine = SystemClock()


class Listeners:
    """The directory as one store of one process uses it."""

    def __init__(self, path: str) -> None:
        self._file = os.path.realpath(path)
        self.directory = f"{self._file}-wake"
        #: The directory that was checked, and its state when it was last listed.
        self._descriptor: int | None = None
        self._listed: tuple[int, int, int] | None = None
        self._names: list[str] = []
        self._own = ""
        self._sending: socket.socket | None = None
        self._by_descriptor = os.path.isdir(_DESCRIPTORS)

    def listen(self) -> socket.socket:
        """Return a socket of this process's own in the directory, which is made when it is missing."""
        for tries_left in reversed(range(_BIND_TRIES)):
            try:
                self._make()
                self._enter()
                return self._bind()
            except FileNotFoundError:
                if not tries_left:
                    raise
        raise AssertionError("unreachable")

    def notify(self) -> bool:
        """Send a byte to every other process that listens; return whether there is one."""
        try:
            self._look()
        except FileNotFoundError:
            self._leave()  # the last listener has removed the directory
        if self._names and self._sending is None:
            self._sending = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._sending.setblocking(False)
        for name in self._names:
            self._notify_one(name)
        return bool(self._names)

    def close(self) -> None:
        """Remove the socket of this process, those of dead ones, and the directory after the last; never raises."""
        with contextlib.suppress(OSError):
            if self._own:
                self._remove(self._own)
                self._own = ""
                self.notify()
                os.rmdir(self.directory)  # refused while other processes listen there
        self._leave()
        if self._sending is not None:
            self._sending.close()
            self._sending = None

    # the directory

    def _make(self) -> None:
        """Make the directory, with owner, group and rights of the file, unless it is there."""
        try:
            os.mkdir(self.directory, mode=0o700)
        except FileExistsError:
            return
        made = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            file = os.stat(self._file)
            with contextlib.suppress(PermissionError):
                os.fchown(made, _owner_given(file), file.st_gid)
            mode = 0o700
            if file.st_mode & _GROUP_WRITES and os.fstat(made).st_gid == file.st_gid:
                mode |= 0o070
            if file.st_mode & _OTHERS_WRITE:
                mode |= 0o007
            os.fchmod(made, mode)
        finally:
            os.close(made)

    def _enter(self) -> None:
        """Hold on to the directory that is there now; an error if it is not to be trusted."""
        self._leave()
        entered = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            _refuse_foreign(os.fstat(entered), os.stat(self._file))
        except BaseException:
            os.close(entered)
            raise
        self._descriptor = entered

    def _look(self) -> None:
        """List the other processes, unless nothing has changed since that was last done."""
        found = os.lstat(self.directory)
        state = (found.st_dev, found.st_ino, found.st_mtime_ns)
        if state != self._listed:
            self._enter()
            self._names = self._list()
            is_settled = _machine.now() - found.st_mtime_ns // 1_000 > _TICK_MICROS
            self._listed = state if is_settled else None

    def _leave(self) -> None:
        self._listed, self._names = None, []
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _address(self, name: str) -> str:
        if self._by_descriptor:
            return f"{_DESCRIPTORS}/{self._descriptor}/{name}"
        return os.path.join(self.directory, name)

    # the sockets in it

    def _bind(self) -> socket.socket:
        name = f"{os.getpid()}-{system_random().getrandbits(64):016x}"
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            listening.setblocking(False)
            listening.bind(self._address(name))
            file = os.stat(self._file)
            with contextlib.suppress(PermissionError):
                os.chown(name, _owner_given(file), file.st_gid, dir_fd=self._descriptor)
            os.chmod(name, 0o600 | (file.st_mode & 0o066), dir_fd=self._descriptor)
        except BaseException:
            listening.close()
            with contextlib.suppress(OSError):
                self._remove(name)
            raise
        self._own = name
        return listening

    def _list(self) -> list[str]:
        assert self._descriptor is not None
        with os.scandir(self._descriptor) as entries:
            names = [entry.name for entry in islice(entries, LISTENERS_MAX) if entry.name != self._own]
        return [name for name in names if self._is_socket(name)]

    def _is_socket(self, name: str) -> bool:
        try:
            return stat.S_ISSOCK(os.stat(name, dir_fd=self._descriptor, follow_symlinks=False).st_mode)
        except FileNotFoundError:
            return False

    def _notify_one(self, name: str) -> None:
        assert self._sending is not None
        try:
            self._sending.sendto(b"!", self._address(name))
        except BlockingIOError:
            pass  # its buffer is full of bytes that it has not read yet
        except ConnectionRefusedError:
            self._listed = None
            with contextlib.suppress(OSError):
                self._remove(name)  # its process is gone
        except OSError:
            self._listed = None

    def _remove(self, name: str) -> None:
        if self._is_socket(name):
            os.unlink(name, dir_fd=self._descriptor)


def _owner_given(file: os.stat_result) -> int:
    """Return the owner to give to what is made here: only the superuser can give things away."""
    return file.st_uid if os.geteuid() == 0 else -1


def _refuse_foreign(directory: os.stat_result, file: os.stat_result) -> None:
    """Raise ``PermissionError`` unless every user that owns or may write the directory may write the file as well."""
    of_group = bool(file.st_mode & _GROUP_WRITES) and directory.st_gid == file.st_gid
    of_others = bool(file.st_mode & _OTHERS_WRITE)
    is_owned = directory.st_uid in (0, os.geteuid(), file.st_uid) or of_group or of_others
    is_open = (directory.st_mode & _GROUP_WRITES and not (of_group or of_others)) or (
        directory.st_mode & _OTHERS_WRITE and not of_others
    )
    if not is_owned or is_open:
        raise PermissionError(errno.EPERM, "owned or writable by users that may not write the database")
