"""The people around generated programs: users who send signals, and operators.

They use an app as any program would, so they work in simulated worlds and beside real processes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import msgspec

from onefold.app import App
from onefold.errors import OnefoldError, StoreUnavailableError
from onefold.store import Query, Record, State
from onefold.store.journal_lines import LineKind
from onefold.testing.programs.description import read, signals_of
from onefold.testing.programs.outside import Outside, StaleCallerError
from onefold.workflows.saga import is_of_undo
from onefold.workflows.saga_status import SagaStatus

#: The message types that are programs.
RUNS = ("program", "nested", "deal")

_BY = {"actor": "chance", "reason": "chance"}
#: The kinds of lines from which a saga is restarted.
_RESTARTABLE = (LineKind.RESULT, LineKind.TIMER, LineKind.SENT, LineKind.BEGUN, LineKind.FAILED)


class People:
    """Users and operators; ``log`` is called with each of their acts."""

    def __init__(self, outside: Outside, chance: random.Random, log: Callable[[str], object]) -> None:
        self._outside = outside
        self._chance = chance
        self._log = log

    async def runs(self, app: App) -> list[Record]:
        """Return the runs that have not ended."""
        return [one for one in await all_records(app) if one.envelope.message_type in RUNS and not one.state.ended]

    async def unfinished(self, app: App) -> list[Record]:
        """Return the messages that have to end yet: those alive, and the dead letters that will be redriven."""
        found = await all_records(app)
        sagas = {one.envelope.id for one in found if one.envelope.saga}
        return [one for one in found if not one.state.ended or (one.state is State.DEAD and not _is_of(one, sagas))]

    # users

    async def tell(self, app: App) -> None:
        """Send one run a signal that it may wait for: too early, in time or too late, and sometimes twice."""
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
        """Do one random act of an operator."""
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
        undone = any(line.kind is LineKind.UNDO for line in lines)
        # Most sagas are left alone while they go forward, so that some of the restarted ones complete.
        undoing = ["restart", "restart", "restart", "resume"]
        verb = self._chance.choice(undoing if undone else ["cancel", "restart", "", "", ""])
        if verb == "cancel":
            self._log(f"cancel {run_id} {await app.cancel(run_id, **_BY)}")
        elif verb == "resume":
            self._log(f"resume {run_id} {await app.resume(run_id, **_BY)}")
        elif verb and (names := [one.name for one in lines if one.kind in _RESTARTABLE and not is_of_undo(one)]):
            # Most operators restart it near the point where it failed.
            name = self._chance.choice(names[-2:] if self._chance.random() < 0.7 else names)
            try:
                forgotten = await app.restart(run_id, from_step=name, **_BY)
                self._log(f"restart {run_id} from {name}: {forgotten}")
            except StoreUnavailableError:
                raise
            except OnefoldError as error:
                self._log(f"restart {run_id} from {name}: refused: {error}")

    async def resolve(self, app: App, runs: Sequence[Record]) -> None:
        """Look up uncertain effects at the provider, and resolve them."""
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
                        break  # the run has a later owner by now
                    happened = found is not None
                    done = await app.resolve(run_id, entry.name, happened=happened, value=found, **_BY)
                    self._log(f"resolve {run_id} {entry.name} happened={happened}: {done}")

    async def calm_down(self, app: App) -> None:
        """Send every signal that programs wait for, resolve and resume them, and redrive dead letters."""
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
    """Whether a message is a saga or one of its commands, which may rightly stay dead."""
    return bool(sagas & {record.envelope.id, record.envelope.correlation_id})


def _signals(record: Record) -> dict[int, int]:
    return signals_of(read(msgspec.json.decode(record.envelope.payload_inline or b"")["body"]))


async def all_records(app: App) -> list[Record]:
    """Return every message."""
    found: list[Record] = []
    while page := await app.find(Query(after=found[-1].envelope.id if found else "", limit=1_000)):
        found += page
    return found
