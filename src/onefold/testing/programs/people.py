"""The people around generated programs: those who tell runs what they wait for, and operators.

They use an app as any program would, so the same people live in simulated worlds and beside real processes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import msgspec

from onefold.app import App
from onefold.errors import OnefoldError, StoreUnavailableError
from onefold.status import SagaStatus, is_of_undo
from onefold.step import StepKind
from onefold.store import Query, Record, State
from onefold.testing.programs.description import read, signals_of
from onefold.testing.programs.outside import Outside, StaleCallerError

#: The messages that are programs.
RUNS = ("program", "nested", "deal")

_BY = {"actor": "chance", "reason": "chance"}
#: Lines from which a person sends a saga back.
_RESTARTABLE = (StepKind.RESULT, StepKind.TIMER, StepKind.SENT, StepKind.BEGUN, StepKind.FAILED)


class People:
    """All of them; ``log`` is told what they do."""

    def __init__(self, outside: Outside, chance: random.Random, log: Callable[[str], object]) -> None:
        self._outside = outside
        self._chance = chance
        self._log = log

    async def runs(self, app: App) -> list[Record]:
        """Return the runs that have not ended."""
        return [one for one in await all_records(app) if one.envelope.message_type in RUNS and not one.state.ended]

    async def unfinished(self, app: App) -> list[Record]:
        """Return what is to be brought to its end yet: what is alive, and what is dead and to be redriven."""
        found = await all_records(app)
        sagas = {one.envelope.id for one in found if one.envelope.saga}
        return [one for one in found if not one.state.ended or (one.state is State.DEAD and not _is_of(one, sagas))]

    # telling

    async def tell(self, app: App) -> None:
        """Tell one run something that it may wait for: too early, in time or too late, and sometimes twice."""
        chance = self._chance
        told = [(one.envelope.id, n) for one in await self.runs(app) for n in _signals(one)]
        if told:
            run_id, n = chance.choice(told)
            value = chance.choice([1, 2])
            for _ in range(chance.choice([1, 1, 2])):
                await app.signal(run_id, f"go{n}", value, id=f"{n}-{value}")
            self._log(f"told {run_id} go{n}")

    # operators

    async def act(self, app: App) -> None:
        """Do what comes to hand."""
        chance, roll = self._chance, self._chance.random()
        letters = [letter async for letter in app.dead_letters()]
        runs = await self.runs(app)
        if roll < 0.3 and letters:
            letter = chance.choice(letters)
            self._log(f"redrive {letter.id} {await letter.redrive(**_BY)}")
        elif roll < 0.5:
            await self.resolve(app, runs)
        elif sagas := [one for one in runs if one.envelope.saga]:
            await self._act_on_saga(app, chance.choice(sagas).envelope.id)
        elif runs:
            run_id = chance.choice(runs).envelope.id
            self._log(f"resume {run_id} {await app.resume(run_id, **_BY)}")

    async def _act_on_saga(self, app: App, run_id: str) -> None:
        lines = await app.journal(run_id)
        undone = any(line.kind is StepKind.UNDO for line in lines)
        # Most sagas are left alone while they go forward, so that some of those that went back come through.
        undoing = ["restart", "restart", "restart", "resume"]
        verb = self._chance.choice(undoing if undone else ["cancel", "restart", "", "", ""])
        if verb == "cancel":
            self._log(f"cancel {run_id} {await app.cancel(run_id, **_BY)}")
        elif verb == "resume":
            self._log(f"resume {run_id} {await app.resume(run_id, **_BY)}")
        elif verb and (names := [one.name for one in lines if one.kind in _RESTARTABLE and not is_of_undo(one)]):
            # Most people send it back to where it failed.
            name = self._chance.choice(names[-2:] if self._chance.random() < 0.7 else names)
            try:
                forgotten = await app.restart(run_id, from_step=name, **_BY)
                self._log(f"restart {run_id} from {name}: {forgotten}")
            except StoreUnavailableError:
                raise
            except OnefoldError as error:
                self._log(f"restart {run_id} from {name}: refused: {error}")

    async def resolve(self, app: App, runs: Sequence[Record]) -> None:
        """Find out what became of uncertain effects, and say so."""
        for record in runs:
            run_id = record.envelope.id
            if record.state is not State.PARKED or record.envelope.saga:
                continue
            for entry in await app.ledger(run_id):
                if entry.state == "uncertain":
                    place = entry.name.rpartition("/p")[2]
                    try:
                        found = self._outside.find(run_id, place, record.fence)
                    except StaleCallerError:
                        break  # the run has gone on since it was looked up
                    happened = found is not None
                    done = await app.resolve(run_id, entry.name, happened=happened, value=found, **_BY)
                    self._log(f"resolve {run_id} {entry.name} happened={happened}: {done}")

    async def calm_down(self, app: App) -> None:
        """Do for every program what it waits for: tell it everything, look after it, and redrive what is dead."""
        runs = await self.runs(app)
        await self.resolve(app, runs)
        for record in runs:
            run_id = record.envelope.id
            for n, times in _signals(record).items():
                for number in range(times):
                    await app.signal(run_id, f"go{n}", number, id=f"{n}-calm-{number}")
            if record.envelope.saga:
                saga = await app.saga_status(run_id)
                if saga is not None and saga.status is SagaStatus.STUCK:
                    await app.resume(run_id, **_BY)
        dead = [one.envelope.id for one in await self.unfinished(app) if one.state is State.DEAD]
        if dead:
            await app.redrive(dead, **_BY)


def _is_of(record: Record, sagas: set[str]) -> bool:
    """Whether a message is a saga or one of its commands, which may well be left dead."""
    return bool(sagas & {record.envelope.id, record.envelope.correlation_id})


def _signals(record: Record) -> dict[int, int]:
    return signals_of(read(msgspec.json.decode(record.envelope.payload_inline or b"")["body"]))


async def all_records(app: App) -> list[Record]:
    """Return every message."""
    found: list[Record] = []
    while page := await app.find(Query(after=found[-1].envelope.id if found else "", limit=1_000)):
        found += page
    return found
