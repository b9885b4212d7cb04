"""Stage 6, lease: a worker in a process of its own, below a supervisor.

Started by ``onefold.process`` with MODULE:APP CONTROL BOARD FAULTS, the numbers of three inherited descriptors:
the line to the supervisor, the memory shared with it, and a file for the stacks of a process that dies.
It ends when it is told to, when it is idle if that was ordered, and when the supervisor is gone.
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

from onefold import limits, tether
from onefold.app import App
from onefold.clock import SystemClock
from onefold.control import LINE_BYTES_MAX, Failed, Orders, Ready, Stopped, Word, decode_orders, line_of
from onefold.errors import ConfigurationError, OnefoldError, StoreUnavailableError
from onefold.fleet import WorkerSettings
from onefold.loading import load_app, set_up_logging
from onefold.slots import Board
from onefold.spawning import end_forks, leave
from onefold.store import Lane
from onefold.version import __version__
from onefold.worker import Worker

logger = logging.getLogger("onefold")


class Child:
    """One worker, its line to the supervisor and their shared memory."""

    def __init__(self, line: socket.socket, board: int, orders: Orders) -> None:
        self._line = line
        self._orders = orders
        self._board = Board(board, orders.capacity)
        self._clock = SystemClock()
        self._worker: Worker | None = None
        self._told_to_stop = False
        self.ready = False

    async def work(self, app: App) -> None:
        """Work until told to stop; then everything is settled or handed back, and the supervisor knows."""
        loop = asyncio.get_running_loop()
        self._line.setblocking(False)
        loop.add_reader(self._line, self._listen)
        loop.add_signal_handler(signal.SIGTERM, self._stop)
        # Ctrl-C and the end of a terminal reach the whole group of processes; the supervisor decides what they mean.
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
        self.say(Stopped(settled))

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
        self.say(Ready())
        if self._told_to_stop:
            worker.stop()

    def _beat(self) -> None:
        """Show that the event loop moves, now and from now on."""
        self._board.beat(at=self._clock.steady(), memory=_resident_bytes())
        asyncio.get_running_loop().call_later(self._orders.beat_seconds, self._beat)

    def _listen(self) -> None:
        """Whatever comes means stop: the word for it, or the silence of a supervisor that is gone."""
        word = b""
        with suppress(OSError):
            word = self._line.recv(LINE_BYTES_MAX)
        if not word:
            tether.noticed(self._orders.stop_seconds + limits.STOP_MARGIN_SECONDS)
        asyncio.get_running_loop().remove_reader(self._line)
        self._stop()

    def _stop(self) -> None:
        self._told_to_stop = True
        if self._worker is not None:
            self._worker.stop()

    def say(self, word: Word) -> None:
        """Tell the supervisor, if it is still there."""
        with suppress(OSError):
            self._line.sendall(line_of(word))


def _ignore() -> None:
    """Do nothing; unlike a signal that is ignored, this is not passed on to programs that a handler starts."""


def _resident_bytes() -> int:
    """How much memory this process takes, or where that cannot be asked the most it ever took."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024


def _read_orders(line: socket.socket) -> Orders:
    text = b""
    while not text.endswith(b"\n"):
        part = line.recv(LINE_BYTES_MAX)
        if not part:
            sys.exit("the supervisor was gone before it gave its orders")
        text += part
    return decode_orders(text)


def _new_loop() -> asyncio.AbstractEventLoop:
    """Make an event loop, the faster one where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def main() -> None:
    """Be the process."""
    where, *descriptors = sys.argv[1:]
    control, board, faults = map(int, descriptors)
    for descriptor in (control, board, faults):
        os.set_inheritable(descriptor, False)
    faulthandler.enable(file=faults)
    line = socket.socket(fileno=control)
    orders = _read_orders(line)
    tether.follow(orders.parent)
    child = Child(line, board, orders)
    try:
        if orders.version != __version__:
            raise ConfigurationError(
                f"onefold {__version__} was installed below a supervisor of version {orders.version}; start it again"
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


def failure_of(error: BaseException) -> Failed:
    """Say why it never became ready."""
    stack = "" if isinstance(error, OnefoldError) else traceback.format_exc()
    reason = f"{type(error).__name__}: {error}" if stack else str(error)
    later = isinstance(error, StoreUnavailableError)
    return Failed(reason[: limits.ERROR_TEXT_MAX], stack[-limits.STACK_TEXT_MAX :], later)
