"""Stage 6, lease: one worker process, in its supervisor: its start, the line to it, its end and the traces it leaves.

Processes are spawned, never forked: a fork would copy connections, locks and threads that belong to the parent.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import Callable
from contextlib import ExitStack, suppress

from onefold import limits
from onefold.child_process import command, environment, unnamed_file
from onefold.store import Lane
from onefold.supervisor.ipc import (
    LINE_BYTES_MAX,
    STOP,
    WorkerFailed,
    WorkerOrders,
    WorkerReady,
    WorkerStopped,
    line_of,
    word_of,
)
from onefold.supervisor.shared_memory import Board
from onefold.worker.slots import Slot

#: A process that is to write its stacks before it dies is killed after this time.
_STACKS_SECONDS = 2.0
#: The line is at its end as soon as the process has ended, unless a program that it started keeps the line open.
_LAST_LINE_SECONDS = 1.0


class WorkerProcess:
    """One worker process, which may have ended."""

    def __init__(self, process: asyncio.subprocess.Process, orders: WorkerOrders, board: Board, faults: int) -> None:
        self._process = process
        self._faults = faults
        self._line: asyncio.StreamWriter | None = None
        self._settled_at_end = 0
        self.orders = orders
        self.board = board
        self.ready = asyncio.Event()
        #: It has ended, and its messages are settled or handed back.
        self.gone = asyncio.Event()
        #: It has handled so many messages, or takes so much memory, that it is to be replaced.
        self.worn = asyncio.Event()
        #: When it was asked to stop, on the steady clock; None before.
        self.leaving_at: int | None = None
        #: When it was started, on the steady clock and as wall-clock time.
        self.started_at = 0
        self.started_on = 0
        #: For how long its event loop has not moved.
        self.stalled_seconds = 0.0
        self.failure: WorkerFailed | None = None
        self.stopped: WorkerStopped | None = None
        #: Why the supervisor killed it; None if it did not.
        self.killed_for: str | None = None
        #: The messages that are blamed for that; None blames all that it was running.
        self.blamed: frozenset[Slot] | None = None

    @property
    def name(self) -> str:
        """The worker's name in the store."""
        return self.orders.name

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def lane(self) -> Lane:
        return Lane(self.orders.lane)

    @property
    def code(self) -> int | None:
        """Its exit code, or minus the signal that ended it; None while it runs."""
        return self._process.returncode

    @property
    def settled(self) -> int:
        """How many messages it has settled, as far as it has reported."""
        if self.stopped is not None:
            return self.stopped.settled
        return self._settled_at_end if self.gone.is_set() else self.board.settled

    @property
    def leaving(self) -> bool:
        return self.leaving_at is not None

    def running(self) -> list[Slot]:
        """Return the slots of the handlers that it has begun and not finished."""
        return [slot for slot in self.board.slots() if not slot.finished]

    async def attend(self, ours: socket.socket) -> None:
        """Send it its orders and read its words until it has ended."""
        reader, self._line = await asyncio.open_connection(sock=ours, limit=LINE_BYTES_MAX)
        self._line.write(line_of(self.orders))
        listening = asyncio.create_task(self._listen(reader), name="onefold-line")
        await self._process.wait()
        await asyncio.wait([listening], timeout=_LAST_LINE_SECONDS)
        listening.cancel()
        self._line.close()

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        with suppress(OSError):
            while line := await reader.readline():
                match word_of(line):
                    case WorkerReady():
                        self.ready.set()
                    case WorkerFailed() as failure:
                        self.failure = failure
                    case WorkerStopped() as stopped:
                        self.stopped = stopped

    # ending it

    def stop(self, *, at: int) -> None:
        """Ask it to finish what it runs, to hand back the rest and to end."""
        if self.leaving_at is None:
            self.leaving_at = at
        if not self.ready.is_set():
            # It holds no messages yet, and does not read its line while it imports the app.
            self._signal(signal.SIGTERM)
        elif self._line is not None:
            self._line.write(STOP)

    def kill(self, why: str, blamed: frozenset[Slot] | None = None) -> None:
        """Kill it; the ``blamed`` messages are counted a crash, or with None all that it was running."""
        if self.killed_for is None:
            self.killed_for, self.blamed = why, blamed
            self._signal(signal.SIGKILL)

    def kill_with_stacks(self, why: str, blamed: frozenset[Slot] | None = None) -> None:
        """Kill it as ``kill`` does, but let it write the stacks of its threads first."""
        if self.killed_for is None:
            self.killed_for, self.blamed = why, blamed
            # faulthandler's handler for this signal works in a process that hangs: it needs no interpreter's lock.
            self._signal(signal.SIGABRT)
            asyncio.get_running_loop().call_later(_STACKS_SECONDS, self._signal, signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    # its traces

    def ending(self) -> str:
        """Return a text for people that says how it ended."""
        if self.killed_for is not None:
            return f"was killed: {self.killed_for}"
        if self.code is None or self.code >= 0:
            return f"ended by itself with exit code {self.code}"
        try:
            return f"died of {signal.Signals(-self.code).name}"
        except ValueError:
            return f"died of signal {-self.code}"

    def stacks(self) -> str:
        """Return the stacks of its threads when it died, as far as it could write them."""
        return os.pread(self._faults, limits.STACK_TEXT_MAX, 0).decode(errors="replace").strip("\0\n")

    def close(self) -> None:
        """Close the memory and the file that it shared."""
        self._settled_at_end = self.board.settled
        self.board.close()
        os.close(self._faults)


async def start_process(
    where: str, make_orders: Callable[[int], WorkerOrders], capacity: int, directory: str | None = None
) -> tuple[WorkerProcess, socket.socket]:
    """Start a process for the app at ``where``, and return it with the line to it, for ``attend``."""
    with ExitStack() as undo:
        board = Board.create(capacity)
        undo.callback(board.close)
        faults = unnamed_file("onefold-faults")
        undo.callback(os.close, faults)
        ours, theirs = socket.socketpair()
        undo.callback(ours.close)
        with theirs:
            descriptors = (theirs.fileno(), board.descriptor, faults)
            process = await asyncio.create_subprocess_exec(
                *command("onefold.processes.worker_main", where, *map(str, descriptors)),
                stdin=subprocess.DEVNULL,
                pass_fds=descriptors,
                cwd=directory,
                env=environment(),
            )
        undo.callback(_end, process)
        ours.setblocking(False)
        started = WorkerProcess(process, make_orders(process.pid), board, faults)
        undo.pop_all()
    return started, ours


def _end(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()
