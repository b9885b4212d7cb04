"""The stores of simulated processes: the world decides which calls fail, and a store dies with its process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Protocol

from onefold.errors import StoreUnavailableError
from onefold.store import Fenced, Lane, Lease
from onefold.store.gates import NO_GATINGS, Gating
from onefold.store.sqlite import SQLiteStore
from onefold.store.sqlite.connection import Patience
from onefold.store.sqlite.drivers import Connection
from onefold.testing.checker import Journal
from onefold.testing.faults import Fault, FaultyStore
from onefold.testing.world.loop import Process, SimulatedClock


class Crashed(BaseException):
    """Raised in a dead process; code that catches it is cleanup, and its store refuses every call."""


class Trouble(Protocol):
    """The part of the world that a store uses."""

    journal: Journal

    def log(self, process: Process | None, event: str) -> None: ...

    def note_death(self, process: Process) -> None: ...

    async def trouble(self, store: SimulatedStore, process: Process, verb: str) -> Fault | None: ...


class MortalStore(SQLiteStore):
    """A store that keeps its connections, so that they can be closed abruptly."""

    def _connect(self, patience: Patience) -> Connection:
        connection = super()._connect(patience)
        self.connections.append(connection)
        return connection

    @cached_property
    def connections(self) -> list[Connection]:
        return []


class SimulatedStore(FaultyStore):
    """The store of one simulated process; dies with it."""

    def __init__(self, inner: MortalStore, world: Trouble, process: Process, clock: SimulatedClock) -> None:
        super().__init__(inner, clock=clock)
        self._sqlite = inner
        self._world = world
        self._process = process
        self._answer: set[tuple[str, int]] = set()
        #: Leases that were given to this process in an answer that was lost.
        self.unaware: set[tuple[str, int]] = set()

    async def before(self, verb: str) -> Fault | None:
        if self._process.dead:
            raise Crashed
        self._world.log(self._process, verb)
        return await self._world.trouble(self, self._process, verb)

    def after(self, verb: str, fault: Fault | None) -> None:
        if fault is None:
            return
        self._world.log(self._process, f"{verb}: {fault.kind}")
        if verb == "claim":
            self.unaware |= self._answer
        if fault.kind == "kill after":
            self.die()
        raise StoreUnavailableError(f"the answer to {verb} was lost")

    async def claim(
        self,
        queues: Sequence[str],
        *,
        types: Sequence[str],
        limit: int,
        lease: float,
        worker: str,
        lane: Lane = Lane.ANY,
        gatings: Mapping[str, Gating] = NO_GATINGS,
        at_once: int | None = None,
        thorough: bool = True,
    ) -> list[Lease]:
        async def claim() -> list[Lease]:
            leases = await self._sqlite.claim(
                queues,
                types=types,
                limit=limit,
                lease=lease,
                worker=worker,
                lane=lane,
                gatings=gatings,
                at_once=at_once,
                thorough=thorough,
            )
            self._answer = {(one.id, one.fence) for one in leases}
            for one in leases:
                self._world.journal.claim(worker, one.id, one.fence)
                self._world.log(self._process, f"has {one.id} fence {one.fence}")
            return leases

        return await self.call("claim", claim)

    async def extend(self, leases: Sequence[Fenced], *, lease: float, starting: bool = False) -> list[bool]:
        return await self.call("extend", lambda: self._sqlite.extend(leases, lease=lease, starting=starting))

    def die(self) -> None:
        """Kill the process: its open transaction is rolled back, and its code never runs again."""
        self.break_off()
        self._world.note_death(self._process)
        raise Crashed

    def break_off(self) -> None:
        """Close the file as the kernel does for a killed process, without closing the store."""
        for connection in self._sqlite.connections:
            connection.close(True)
