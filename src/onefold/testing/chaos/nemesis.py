"""The faults of a chaos run: in processes, sessions, the network, the lock and the disk, at random from a seed.

Each kind of fault repeats at a rate of its own and is counted.  The seed decides which faults occur and how long they
last; the moment depends on the machine, so a seed finds a defect again often but not always.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE
from typing import LiteralString

import psycopg

from onefold.clock import SystemClock
from onefold.testing.chaos.fleet import Fleet, Member
from onefold.testing.proxy import Proxy
from onefold.testing.servers import PostgresServer

#: How long a process is frozen, in seconds; its lease lasts one second, so some freezes outlast it and some do not.
FROZEN_SECONDS = (0.8, 3.0)
#: How long another process holds SQLite's lock.
LOCKED_SECONDS = (0.05, 4.0)
#: How long the network holds back all bytes.
HELD_SECONDS = (0.2, 1.5)
#: How many sessions are ended or disturbed at a time; 100 stands for all of them.  Most sessions live long enough to
#: collect the state of long connections: prepared statements, plans, settings.
SESSIONS = (1, 1, 1, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 5, 5, 5, 6, 100)

Strike = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Rhythm:
    """A fault that repeats after a random pause of ``seconds`` on average."""

    strike: Strike
    seconds: float


class Nemesis(ABC):
    """Harms the processes of a fleet; a subclass for each engine harms the store below them."""

    def __init__(self, fleet: Fleet, seed: str, *, pace: float = 1.0) -> None:
        self.events: Counter[str] = Counter()
        self.chance = random.Random(f"{seed} nemesis")
        self.clock = SystemClock()
        self._fleet = fleet
        self._pace = pace

    async def run(self, stopping: asyncio.Event) -> None:
        """Cause faults until told to stop; afterwards the store works again and no process is frozen."""
        rhythms = [
            Rhythm(self._hit_worker, 1.0),
            Rhythm(self._freeze_worker, 4.0),
            Rhythm(self._hit_sender, 5.0),
            Rhythm(self._tend, 0.2),
            *self.rhythms(),
        ]
        async with AsyncExitStack() as stack:
            await self.prepare(stack)
            async with asyncio.TaskGroup() as group:
                striking = [group.create_task(self._keep_striking(rhythm)) for rhythm in rhythms]
                await stopping.wait()
                for task in striking:
                    task.cancel()

    async def _keep_striking(self, rhythm: Rhythm) -> None:
        while True:
            await self.clock.sleep(self.chance.uniform(0.2, 1.8) * rhythm.seconds / self._pace)
            await rhythm.strike()

    @abstractmethod
    def rhythms(self) -> Sequence[Rhythm]:
        """Return the faults of this store."""

    @abstractmethod
    async def prepare(self, stack: AsyncExitStack) -> None:
        """Open the resources that the faults need; when the stack ends, the store works again."""

    # processes

    async def _tend(self) -> None:
        self._fleet.tend()

    async def _hit_worker(self) -> None:
        # The first worker is spared, so that one process of the run lives long.
        member = self._fleet.pick("worker", "supervisor", spare_first=True)
        if member is None:
            return
        # A supervisor rightly gives up when its processes keep dying before they are ready: kill only ready ones.
        below = member.ready if member.role == "supervisor" else []
        if self.chance.random() < 0.1:
            member.doomed = True
            member.process.terminate()
            self.events[f"{member.role}s stopped gracefully"] += 1
        elif below and self.chance.random() < 0.7:
            with suppress(ProcessLookupError):
                os.kill(self.chance.choice(below), signal.SIGKILL)
            self.events["workers killed"] += 1
        else:
            member.kill()
            self.events["supervisors killed" if member.role == "supervisor" else "workers killed"] += 1

    async def _hit_sender(self) -> None:
        if (member := self._fleet.pick("sender")) is not None:
            if self.chance.random() < 0.3:
                await self._freeze(member)
            else:
                member.kill()
                self.events["senders killed"] += 1

    async def _freeze_worker(self) -> None:
        if (member := self._fleet.pick("worker", "supervisor")) is not None:
            await self._freeze(member)

    async def _freeze(self, member: Member) -> None:
        """Stop a process and its children with SIGSTOP, like a suspended machine, and let them continue later."""
        frozen = member.signal(signal.SIGSTOP)
        self.events[f"{'senders' if member.role == 'sender' else 'workers'} frozen"] += 1
        try:
            await self.clock.sleep(self.chance.uniform(*FROZEN_SECONDS))
        finally:
            # By process id: the children of a supervisor that was killed meanwhile are still frozen.
            for pid in frozen:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)


class SQLiteNemesis(Nemesis):
    """Another process holds the lock; disk faults happen inside the workers themselves."""

    def __init__(self, fleet: Fleet, seed: str, path: Path, *, pace: float = 1.0) -> None:
        super().__init__(fleet, seed, pace=pace)
        self._path = path
        self._locker: asyncio.subprocess.Process | None = None

    def rhythms(self) -> Sequence[Rhythm]:
        return [Rhythm(self._hold_lock, 2.5)]

    async def prepare(self, stack: AsyncExitStack) -> None:
        words = ("-m", "onefold.testing.chaos.lock", str(self._path))
        self._locker = await asyncio.create_subprocess_exec(sys.executable, *words, stdin=PIPE, stdout=PIPE)
        stack.push_async_callback(self._end_locker, self._locker)

    async def _end_locker(self, locker: asyncio.subprocess.Process) -> None:
        with suppress(ProcessLookupError):
            locker.kill()
        await locker.wait()

    async def _hold_lock(self) -> None:
        assert self._locker is not None
        assert self._locker.stdin is not None
        assert self._locker.stdout is not None
        self._locker.stdin.write(f"{self.chance.uniform(*LOCKED_SECONDS)}\n".encode())
        if await self._locker.stdout.readline() == b"held\n":
            self.events["locks held by another process"] += 1


class PostgresNemesis(Nemesis):
    """Sessions are ended or cancelled, the network to the server fails, and the server may restart."""

    def __init__(
        self,
        fleet: Fleet,
        seed: str,
        server: PostgresServer,
        database: str,
        proxy: Proxy,
        *,
        pace: float,
        restarts: bool,
    ) -> None:
        super().__init__(fleet, seed, pace=pace)
        self._server = server
        self._database = database
        self._proxy = proxy
        self._restarts = restarts

    def rhythms(self) -> Sequence[Rhythm]:
        network = [
            Rhythm(self._terminate, 1.0),
            Rhythm(self._cancel, 1.0),
            Rhythm(self._cut, 8.0),
            Rhythm(self._lose, 1.0),
            Rhythm(self._hold, 6.0),
        ]
        return [*network, Rhythm(self._restart, 30.0)] if self._restarts else network

    async def prepare(self, stack: AsyncExitStack) -> None:
        stack.push_async_callback(self._proxy.switch, "pass")

    async def _terminate(self) -> None:
        self.events["backends terminated"] += await self._disturb("SELECT pg_terminate_backend(%s)")

    async def _cancel(self) -> None:
        self.events["statements cancelled"] += await self._disturb("SELECT pg_cancel_backend(%s)")

    async def _disturb(self, statement: LiteralString) -> int:
        """Run this statement on some sessions of the run; return how many it affected."""
        done = 0
        # While the server restarts there are no sessions.
        with suppress(psycopg.OperationalError):
            async with await psycopg.AsyncConnection.connect(self._server.url(), autocommit=True) as connection:
                found = await connection.execute(_SESSIONS, (self._database,))
                pids = [pid for (pid,) in await found.fetchall()]
                number = min(self.chance.choice(SESSIONS), len(pids))
                for pid in self.chance.sample(pids, number):
                    answer = await (await connection.execute(statement, (pid,))).fetchone()
                    done += bool(answer and answer[0])
        return done

    async def _cut(self) -> None:
        self._proxy.cut()
        self.events["networks cut"] += 1

    async def _lose(self) -> None:
        if self.chance.random() < 0.5:
            self._proxy.lose_next_reply()
            self.events["answers lost"] += 1
        else:
            self._proxy.lose_next_request()
            self.events["requests lost"] += 1

    async def _hold(self) -> None:
        await self._proxy.switch("hold")
        await self.clock.sleep(self.chance.uniform(*HELD_SECONDS))
        await self._proxy.switch("pass")
        self.events["networks held up"] += 1

    async def _restart(self) -> None:
        if self.chance.random() < 0.5:
            await asyncio.to_thread(self._server.kill)
            self.events["servers killed"] += 1
        else:
            self.events["servers restarted"] += 1
        await asyncio.to_thread(self._server.restart)


_SESSIONS = "SELECT pid FROM pg_stat_activity WHERE datname = %s AND pid <> pg_backend_pid() ORDER BY pid"
