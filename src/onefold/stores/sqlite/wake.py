"""Waking the workers that wait on a SQLite file, in this process and in others, without polling in between.

All of it is a hint: a lost one costs at most one polling interval, so nothing that goes wrong here ever fails the
send or the settlement that it was for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket

from onefold.stores.sqlite.listeners import LISTENERS_MAX, Listeners

logger = logging.getLogger("onefold")

#: Other processes are woken at most this often: a process that commits faster need not tell them each time.
_RING_SECONDS = 0.001
#: While no other process listens, commits look for listeners only this often.
_LOOK_SECONDS = 0.005


class Wake:
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
            # What is left after that many is read at the next turn of the loop.
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
