"""Stage 6, lease: a supervisor's hold on one worker process: starting it, hearing it, ending it, and what it left.

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
from onefold.control import LINE_BYTES_MAX, STOP, Failed, Orders, Ready, Stopped, line_of, word_of
from onefold.slots import Board, Slot
from onefold.spawning import command, environment, unnamed_file
from onefold.store import Lane

#: A process that is killed may first write down where it was; then it has this long to be gone.
_LAST_WORDS_SECONDS = 2.0
#: What a process said before it ended is there at once, unless something it started keeps its line open.
_LAST_LINE_SECONDS = 1.0


class WorkerProcess:
    """One worker process; ``over`` is set when it has ended, and ``code`` says how."""

    def __init__(self, process: asyncio.subprocess.Process, orders: Orders, board: Board, faults: int) -> None:
        self._process = process
        self._faults = faults
        self._line: asyncio.StreamWriter | None = None
        self._settled_at_end = 0
        self.orders = orders
        self.board = board
        self.ready = asyncio.Event()
        self.over = asyncio.Event()
        #: It has ended and nothing it held is left with it.
        self.buried = asyncio.Event()
        #: It is to be replaced; once it has a successor it is asked to leave.
        self.worn = asyncio.Event()
        #: When it was asked to leave, on the steady clock; None before.
        self.leaving_at: int | None = None
        #: When it was started, on the steady clock and for people, and for how long its event loop has not moved.
        self.started_at = 0
        self.started_on = 0
        self.stalled_seconds = 0.0
        self.failure: Failed | None = None
        self.stopped: Stopped | None = None
        #: Why the supervisor killed it, if it did, and which messages are to blame; None: whatever it was running.
        self.killed_for: str | None = None
        self.guilty: frozenset[Slot] | None = None

    @property
    def name(self) -> str:
        """The worker's name, by which the store knows it."""
        return self.orders.name

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def lane(self) -> Lane:
        return Lane(self.orders.lane)

    @property
    def code(self) -> int | None:
        """How it ended: its exit code, or minus the signal that ended it."""
        return self._process.returncode

    @property
    def settled(self) -> int:
        """How many messages it has settled, as far as it has said so."""
        if self.stopped is not None:
            return self.stopped.settled
        return self._settled_at_end if self.buried.is_set() else self.board.settled

    @property
    def leaving(self) -> bool:
        return self.leaving_at is not None

    def running(self) -> list[Slot]:
        """Return what it has begun and not finished."""
        return [slot for slot in self.board.slots() if not slot.finished]

    async def attend(self, ours: socket.socket) -> None:
        """Give it its orders and hear what it says until it has ended."""
        reader, self._line = await asyncio.open_connection(sock=ours, limit=LINE_BYTES_MAX)
        self._line.write(line_of(self.orders))
        listening = asyncio.create_task(self._listen(reader), name="onefold-line")
        await self._process.wait()
        await asyncio.wait([listening], timeout=_LAST_LINE_SECONDS)
        listening.cancel()
        self._line.close()
        self.over.set()

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        with suppress(OSError):
            while line := await reader.readline():
                match word_of(line):
                    case Ready():
                        self.ready.set()
                    case Failed() as failure:
                        self.failure = failure
                    case Stopped() as stopped:
                        self.stopped = stopped

    # ending it

    def stop(self, *, at: int) -> None:
        """Ask it to finish what it runs, to hand back the rest and to end."""
        if self.leaving_at is None:
            self.leaving_at = at
        if not self.ready.is_set():
            # It holds nothing, and while it imports the app it would not listen.
            self._signal(signal.SIGTERM)
        elif self._line is not None:
            self._line.write(STOP)

    def kill(self, why: str, guilty: frozenset[Slot] | None = None) -> None:
        """End it now; only the ``guilty`` are to blame, or with None whatever it was running."""
        if self.killed_for is None:
            self.killed_for, self.guilty = why, guilty
            self._signal(signal.SIGKILL)

    def kill_with_stacks(self, why: str, guilty: frozenset[Slot] | None = None) -> None:
        """End it now as ``kill`` does, but let it write down where each of its threads was."""
        if self.killed_for is None:
            self.killed_for, self.guilty = why, guilty
            # The handler that faulthandler has for this signal needs nothing of a process that hangs.
            self._signal(signal.SIGABRT)
            asyncio.get_running_loop().call_later(_LAST_WORDS_SECONDS, self._signal, signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    # what it left

    def ending(self) -> str:
        """Say how it ended, as a person would."""
        if self.killed_for is not None:
            return f"was killed: {self.killed_for}"
        if self.code is None or self.code >= 0:
            return f"ended by itself with exit code {self.code}"
        try:
            return f"died of {signal.Signals(-self.code).name}"
        except ValueError:
            return f"died of signal {-self.code}"

    def stacks(self) -> str:
        """Return where its threads were when it died, as far as it could write that down."""
        return os.pread(self._faults, limits.STACK_TEXT_MAX, 0).decode(errors="replace").strip("\0\n")

    def close(self) -> None:
        """Let go of what was shared with it."""
        self._settled_at_end = self.board.settled
        self.board.close()
        os.close(self._faults)


async def start_process(
    where: str, make_orders: Callable[[int], Orders], capacity: int, directory: str | None = None
) -> tuple[WorkerProcess, socket.socket]:
    """Start a process for the app at ``where`` and return it with the line to it; ``attend`` goes on from there."""
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
                *command("onefold.child", where, *map(str, descriptors)),
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
