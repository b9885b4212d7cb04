"""Stage 6, lease: the program of a worker process below a supervisor.

Started by ``onefold.supervisor.process`` with MODULE:APP CONTROL BOARD FAULTS; the last three are the numbers of
inherited descriptors: the line to the supervisor, the memory shared with it, and the file for the stacks of a process
that dies.  It ends when the supervisor tells it to or is gone, and with ``until_idle`` when nothing is due.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import resource
import signal
import socket
import sys
import traceback
from contextlib import suppress

from onefold import limits
from onefold.app import App
from onefold.child_process import end_forks, leave
from onefold.clock import SystemClock
from onefold.errors import ConfigurationError, OnefoldError, StoreUnavailableError
from onefold.processes import parent_death
from onefold.processes.load_app import load_app, set_up_logging
from onefold.store import Lane
from onefold.supervisor.ipc import (
    LINE_BYTES_MAX,
    Word,
    WorkerFailed,
    WorkerOrders,
    WorkerReady,
    WorkerStopped,
    decode_orders,
    line_of,
)
from onefold.supervisor.shared_memory import Board
from onefold.version import __version__
from onefold.worker.settings import WorkerSettings
from onefold.worker.worker import Worker

logger = logging.getLogger("onefold")


class WorkerMain:
    """One worker with its line to the supervisor and the memory they share."""

    def __init__(self, line: socket.socket, board: int, orders: WorkerOrders) -> None:
        self._line = line
        self._orders = orders
        self._board = Board(board, orders.capacity)
        self._clock = SystemClock()
        self._worker: Worker | None = None
        self._told_to_stop = False
        self.ready = False

    async def work(self, app: App) -> None:
        """Work until told to stop; on return everything is settled or handed back, and the supervisor is told."""
        loop = asyncio.get_running_loop()
        self._line.setblocking(False)
        loop.add_reader(self._line, self._listen)
        loop.add_signal_handler(signal.SIGTERM, self._stop)
        # Ctrl-C and the end of a terminal reach the whole group of processes; only the supervisor acts on them.
        for number in (signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, _ignore)
        end_forks(loop)
        async with app:
            settled = await app.work_as(
                self._settings(),
                slots=self._board,
                begin=self._begin,
                quarantine_after=limits.QUARANTINE_AFTER_SUPERVISED,
                follows=self._orders.follows,
            )
        self.say(WorkerStopped(settled))

    def _settings(self) -> WorkerSettings:
        orders = self._orders
        return WorkerSettings(
            name=orders.name,
            queues=orders.queues,
            concurrency=orders.concurrency,
            lease_seconds=orders.lease_seconds,
            stop_seconds=orders.stop_seconds,
            until_idle=orders.until_idle,
            lane=Lane(orders.lane),
            alone=False,
        )

    def _begin(self, worker: Worker) -> None:
        self._worker = worker
        self.ready = True
        self._beat()
        self.say(WorkerReady())
        if self._told_to_stop:
            worker.stop()

    def _beat(self) -> None:
        """Write to the board that the event loop moves, now and every ``beat_seconds``."""
        self._board.beat(at=self._clock.steady(), memory=_resident_bytes())
        asyncio.get_running_loop().call_later(self._orders.beat_seconds, self._beat)

    def _listen(self) -> None:
        """Stop: the line has ``STOP``, or was closed because the supervisor is gone."""
        word = b""
        with suppress(OSError):
            word = self._line.recv(LINE_BYTES_MAX)
        if not word:
            parent_death.end_within(self._orders.stop_seconds + limits.STOP_MARGIN_SECONDS)
        asyncio.get_running_loop().remove_reader(self._line)
        self._stop()

    def _stop(self) -> None:
        self._told_to_stop = True
        if self._worker is not None:
            self._worker.stop()

    def say(self, word: Word) -> None:
        """Send a word to the supervisor, if it still exists."""
        with suppress(OSError):
            self._line.sendall(line_of(word))


def _ignore() -> None:
    """Do nothing on a signal; unlike SIG_IGN this is not inherited by programs that a handler starts."""


def _resident_bytes() -> int:
    """Return the memory this process takes; without ``/proc``, the most it ever took."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024


def _read_orders(line: socket.socket) -> WorkerOrders:
    text = b""
    while not text.endswith(b"\n"):
        part = line.recv(LINE_BYTES_MAX)
        if not part:
            sys.exit("the supervisor was gone before it gave its orders")
        text += part
    return decode_orders(text)


def _new_loop() -> asyncio.AbstractEventLoop:
    """Return a new event loop, that of uvloop where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def main() -> None:
    """Run the process, from its descriptors to its exit code."""
    where, *descriptors = sys.argv[1:]
    control, board, faults = map(int, descriptors)
    for descriptor in (control, board, faults):
        os.set_inheritable(descriptor, False)
    faulthandler.enable(file=faults)
    line = socket.socket(fileno=control)
    orders = _read_orders(line)
    parent_death.end_after(orders.parent)
    child = WorkerMain(line, board, orders)
    try:
        if orders.version != __version__:
            raise ConfigurationError(
                f"onefold {__version__} was installed below a supervisor of version {orders.version}; "
                "restart the supervisor"
            )
        app = load_app(where)
        set_up_logging(verbose=orders.verbose)
        _new_loop().run_until_complete(child.work(app))
    except BaseException as error:
        if child.ready:
            logger.exception("worker_broken worker=%s", orders.name)
        else:
            child.say(failure_of(error))
        leave(1)
    leave(0)


def failure_of(error: BaseException) -> WorkerFailed:
    """Return the word that tells the supervisor why this process never became ready."""
    stack = "" if isinstance(error, OnefoldError) else traceback.format_exc()
    reason = f"{type(error).__name__}: {error}" if stack else str(error)
    later = isinstance(error, StoreUnavailableError)
    return WorkerFailed(reason[: limits.ERROR_TEXT_MAX], stack[-limits.STACK_TEXT_MAX :], later)
