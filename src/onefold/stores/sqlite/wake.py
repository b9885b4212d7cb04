"""Waking workers of other processes on the same SQLite file, without anybody polling in between.

Every waiting process listens on a Unix datagram socket in a directory named after the file;
whoever commits sends a byte to each.  All of it is a hint: a lost byte costs at most one polling interval.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import socket
import tempfile

#: Other processes are woken at most this often: whoever commits faster than that need not tell them each time.
_RING_SECONDS = 0.001
#: While nobody listens, whoever commits looks for listeners only this often.
_LOOK_SECONDS = 0.005


class Wake:
    """The doorbell of one file."""

    def __init__(self, path: str, *, between_processes: bool) -> None:
        digest = hashlib.sha256(os.path.realpath(path).encode()).hexdigest()[:24]
        self._directory = os.path.join(tempfile.gettempdir(), f"onefold-wake-{digest}")
        self._between_processes = between_processes and hasattr(socket, "AF_UNIX")
        self._rung = asyncio.Event()
        self._listening: socket.socket | None = None
        self._name = ""
        self._sending: socket.socket | None = None
        self._bells: list[str] = []
        self._bells_as_of = -1
        self._pause: asyncio.TimerHandle | None = None
        self._rung_meanwhile = False

    async def wait(self, timeout: float) -> None:
        """Return when the bell rings, or after ``timeout`` seconds."""
        if self._between_processes and self._listening is None:
            self._listen()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._rung.wait()
        self._rung.clear()

    def ring(self, *, elsewhere: bool = True) -> None:
        """Wake everybody who waits, here and in other processes, or only those who wait here."""
        self._rung.set()
        if not (elsewhere and self._between_processes):
            return
        if self._pause is not None:
            self._rung_meanwhile = True
            return
        pause = _RING_SECONDS if self._ring_others() else _LOOK_SECONDS
        self._pause = asyncio.get_running_loop().call_later(pause, self._end_pause)

    def _end_pause(self) -> None:
        self._pause = None
        if self._rung_meanwhile:
            self._rung_meanwhile = False
            self.ring()

    def _listen(self) -> None:
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(self._directory, mode=0o700)
            self._name = os.path.join(self._directory, f"{os.getpid()}-{id(self):x}")
            self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._listening.setblocking(False)
            self._listening.bind(self._name)
            asyncio.get_running_loop().add_reader(self._listening, self._heard)
        except (OSError, NotImplementedError):
            # The directory belongs to somebody else, or the platform cannot: polling alone must do.
            self._between_processes = False

    def _heard(self) -> None:
        assert self._listening is not None
        with contextlib.suppress(BlockingIOError):
            while True:
                self._listening.recv(64)
                self._rung.set()

    def _ring_others(self) -> bool:
        """Ring at every other process that listens, and say whether there is one."""
        try:
            as_of = os.stat(self._directory).st_mtime_ns
        except OSError:
            return False  # nobody waits on this file
        if as_of != self._bells_as_of:
            self._bells = [entry.path for entry in os.scandir(self._directory) if entry.path != self._name]
            self._bells_as_of = as_of
        if self._sending is None:
            self._sending = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._sending.setblocking(False)
        for bell in self._bells:
            self._send(self._sending, bell)
        return bool(self._bells)

    def _send(self, sending: socket.socket, bell: str) -> None:
        try:
            sending.sendto(b"!", bell)
        except BlockingIOError:
            pass  # its buffer is full of rings it has not heard yet
        except ConnectionRefusedError:
            with contextlib.suppress(OSError):
                os.unlink(bell)  # its process is gone
        except OSError:
            self._bells_as_of = -1

    def close(self) -> None:
        """Stop listening; calling it twice is harmless."""
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
            if self._rung_meanwhile:
                self._ring_others()
        if self._listening is not None:
            with contextlib.suppress(RuntimeError):
                asyncio.get_running_loop().remove_reader(self._listening)
            self._listening.close()
            self._listening = None
            with contextlib.suppress(OSError):
                os.unlink(self._name)
                os.rmdir(self._directory)  # refused while others still listen there
        if self._sending is not None:
            self._sending.close()
            self._sending = None
