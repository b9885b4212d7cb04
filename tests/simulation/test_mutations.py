"""The checkers are checked: each defect put in on purpose is found, and within a bounded number of tries."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from onefold import App, Context, State, children, limits
from onefold.envelope import Envelope
from onefold.journal import Journal as RunJournal
from onefold.step import Note, Step
from onefold.store import Lease, Outcome, PutOptions, Query, Stored
from onefold.stores.rows import message_row
from onefold.stores.sqlite import SQLiteStore
from onefold.stores.sqlite import putting as sqlite_putting
from onefold.stores.sqlite import steps as sqlite_steps
from onefold.stores.sqlite import transaction as sqlite_transaction
from onefold.stores.sqlite.leasing import fences_of, rows_of
from onefold.stores.sqlite.session import SQL, Session
from onefold.stores.sqlite.settling import settle
from onefold.stores.sqlite.steps import SQL as STEPS
from onefold.stretch import Stretch
from onefold.testing import HastyClock, drain
from onefold.testing.checker import Effect, Entry, Final, Journal, check
from onefold.testing.crash import Point, crash_points
from onefold.testing.simulation import Kind, Simulation
from onefold.work import Work

#: A defect that hides for longer than this would hide in two thousand seeds too often.
SEEDS_MAX = 400


def _seed_that_finds(*kinds: str, world: Kind = "tasks") -> int:
    """Run seeds until one shows a violation of these kinds."""
    with Simulation(world) as simulation:
        for seed in range(SEEDS_MAX):
            result = simulation.run(seed)
            broken = [violation for violation in result.report.violations if "the process ended" in violation.problem]
            assert not broken, f"the mutant does not work: {broken[0]}"
            found = [violation for violation in result.report.violations if violation.kind in kinds]
            if found:
                print(f"seed {seed}: {found[0]}")
                return seed
    raise AssertionError(f"the defect was not found by {SEEDS_MAX} seeds")


# the mutants


def _settle_without_fence(patch: pytest.MonkeyPatch) -> None:
    """Whoever comes with a handler's work settles, whether or not the message is still theirs."""

    def unfenced(session: Session, settlements: Sequence[tuple[Lease, Outcome]]) -> None:
        numbers = rows_of(session, [lease for lease, _ in settlements])
        fences = fences_of(session, numbers)
        for (lease, outcome), seq in zip(settlements, numbers, strict=True):
            if seq in fences:
                settle(session, [(msgspec.structs.replace(lease, fence=fences[seq][0]), outcome)])

    patch.setattr(sqlite_transaction, "settle_all", unfenced)


def _settle_after_the_commit(patch: pytest.MonkeyPatch) -> None:
    """The handler's rows first, the outcome in a transaction of its own afterwards."""

    async def commit(self: Work, settlements: Sequence[tuple[Lease, Outcome]]) -> None:
        self._stop_limit()
        await self._leave(None)
        async with self._store.transaction() as transaction:
            await transaction.conclude(settlements)

    patch.setattr(Work, "commit", commit)


def _look_then_insert(patch: pytest.MonkeyPatch) -> None:
    """First a look whether the key is taken, then, a moment later, an insert that does not look again."""

    def insert(session: Session, e: Envelope) -> Stored:
        seq, now = session.rows("put_last")[0][0] + 1, session.clock.now()
        row = (e.scope, e.idempotency_key, 0, seq, e.fingerprint, e.schema_version, None)
        if not session.changes("put_key", [row]):
            session.run("take_key", *row)
        session.run("put_message", seq, *message_row(e, now))
        session.run("put_delivery", seq, *sqlite_putting._delivery(e, now))
        return Stored(e.id, State.SCHEDULED)

    async def put(self: SQLiteStore, envelopes: Sequence[Envelope], options: PutOptions) -> list[Stored]:
        (e,) = envelopes
        look = "SELECT id FROM onefold_key JOIN onefold_message USING (seq) WHERE scope = ? AND key = ? AND kind = 0"
        for (first,) in await self.fetch(look, (e.scope, e.idempotency_key)):
            return [Stored(first, State.SCHEDULED, duplicate=True)]
        return [await self._write(lambda session: insert(session, e))]

    patch.setattr(SQLiteStore, "put", put)


def _forget_the_dead(patch: pytest.MonkeyPatch) -> None:
    """Leases that run out are never given to anybody else."""
    patch.setitem(SQL, "claim_expired", SQL["claim_expired"].replace("WHERE", "WHERE 0 AND"))


def _answer_before_it_is_durable(patch: pytest.MonkeyPatch) -> None:
    """The sender is told that its message is stored while it is still being written."""
    original = SQLiteStore.put

    async def put(self: SQLiteStore, envelopes: Sequence[Envelope], options: PutOptions) -> list[Stored]:
        async def write_later() -> None:
            await self._clock.sleep(0.1)
            await original(self, envelopes, options)

        self._late = asyncio.ensure_future(write_later())  # type: ignore[attr-defined]
        return [Stored(e.id, State.SCHEDULED) for e in envelopes]

    patch.setattr(SQLiteStore, "put", put)


def _send_before_the_commit(patch: pytest.MonkeyPatch) -> None:
    """What a handler sends leaves at once, whatever becomes of the handler."""
    original = Context.execute

    async def execute(self: Context, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        sends, self.buffer.envelopes = self.buffer.envelopes, []
        if sends:
            await self._store.put(sends, PutOptions())
        return await original(self, statement, *parameters)

    patch.setattr(Context, "execute", execute)


@pytest.mark.parametrize(
    ("mutate", "kinds"),
    [
        (_settle_without_fence, ("stale",)),
        (_settle_after_the_commit, ("duplicated", "torn")),
        (_look_then_insert, ("duplicated",)),
        (_forget_the_dead, ("stuck",)),
        (_answer_before_it_is_durable, ("lost",)),
        (_send_before_the_commit, ("phantom",)),
    ],
)
def test_the_simulation_finds_the_defect(
    mutate: Callable[[pytest.MonkeyPatch], None], kinds: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    seed = _seed_that_finds(*kinds)
    monkeypatch.undo()
    with Simulation() as simulation:
        result = simulation.run(seed)
    assert not result.report, f"it was found without the defect too: {result}"


# the mutants of runs


def _park_without_looking(patch: pytest.MonkeyPatch) -> None:
    """Parking overlooks what others recorded since the claim."""
    patch.setitem(STEPS, "settle_park", STEPS["settle_park"].replace("wake < ?1", "?1 IS NOT NULL"))


def _let_a_late_reply_overwrite(patch: pytest.MonkeyPatch) -> None:
    """Of two lines with the same name the last one stands."""
    late = "ON CONFLICT (message_id, name, kind) DO UPDATE SET value = excluded.value"
    patch.setitem(STEPS, "record_step", STEPS["record_step"].replace("ON CONFLICT DO NOTHING", late))


def _take_a_signal_twice(patch: pytest.MonkeyPatch) -> None:
    """A wait is given the oldest signal, whether or not another wait had it."""
    original = RunJournal.take_signal

    def take_signal(self: RunJournal, name: str, signal: str) -> Step | None:
        self._taken.clear()
        return original(self, name, signal)

    patch.setattr(RunJournal, "take_signal", take_signal)


def _forget_the_timer(patch: pytest.MonkeyPatch) -> None:
    """A run that sleeps is parked without an end."""
    patch.setattr(sqlite_steps, "_due_at", lambda outcome, now: limits.INSTANT_MAX)


def _record_a_step_apart(patch: pytest.MonkeyPatch) -> None:
    """The rows of a step first, its record in a transaction of its own afterwards."""
    original = Stretch._commit

    async def commit(
        self: Stretch, lines: Sequence[Step], sends: Sequence[Envelope], notes: Sequence[Note], context: Context | None
    ) -> list[Step]:
        async def nothing(transaction: object) -> None: ...

        if context is not None and context.in_transaction:
            await context.commit_with(nothing)
        return await original(self, lines, sends, notes, None)

    patch.setattr(Stretch, "_commit", commit)


def _let_any_child_answer(patch: pytest.MonkeyPatch) -> None:
    """What was sent before a restart answers for what was sent after it."""
    patch.setattr(children, "answer_line", lambda name, restarts: name)
    patch.setattr(RunJournal, "ended", lambda self, name: next(iter(reversed(self._ends.get(name, ()))), None))


@pytest.mark.parametrize(
    ("mutate", "kinds"),
    [
        (_park_without_looking, ("stuck",)),
        (_let_a_late_reply_overwrite, ("wrong",)),
        (_take_a_signal_twice, ("duplicated",)),
        (_forget_the_timer, ("stuck",)),
        (_record_a_step_apart, ("duplicated", "torn")),
        (_let_any_child_answer, ("wrong",)),
    ],
)
def test_the_simulation_of_runs_finds_the_defect(
    mutate: Callable[[pytest.MonkeyPatch], None], kinds: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    seed = _seed_that_finds(*kinds, world="runs")
    monkeypatch.undo()
    with Simulation("runs") as simulation:
        result = simulation.run(seed)
    assert not result.report, f"it was found without the defect too: {result}"


def test_crash_points_find_an_outcome_that_is_settled_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make_app(trace: Any = None, hours: float = 0.0) -> App:
        clock = HastyClock()
        clock.advance(hours * 3_600)
        app = App(store=SQLiteStore(str(tmp_path / "mutant.db"), clock=clock, trace=trace), clock=clock)

        @app.task(key="{key}")
        async def pay(ctx: Context, key: str) -> None:
            await ctx.execute("INSERT INTO effect VALUES (?, ?, ?)", key, ctx.message.id, ctx.fence)

        return app

    async def prepare(number: int) -> None:
        async with make_app() as app:
            async with app.transaction() as transaction:
                await transaction.execute("CREATE TABLE IF NOT EXISTS effect (key, message, fence)")
            await app.tasks["pay"].send(f"k{number}")

    async def act(point: Point) -> None:
        point.armed = False
        async with make_app(point.trace) as app:
            point.armed = True
            await app.work(until_idle=True)
            point.armed = False

    async def recover(point: Point) -> object:
        async with make_app(hours=1) as app:
            await drain(app)
            key = f"k{point.number}"
            point.journal.invoke("prepared", key)
            rows = await app.store.fetch("SELECT key, message, fence FROM effect WHERE key = ?", [key])
            finals = [r for r in await app.find(Query(limit=1_000)) if r.envelope.idempotency_key == key]
            final = [Final(r.envelope.id, key, r.state) for r in finals]
            return check(point.journal, [Effect(*row) for row in rows], final)

    sound = crash_points(act, recover, prepare=prepare)
    assert not sound.failures, sound
    _settle_after_the_commit(monkeypatch)
    (tmp_path / "mutant.db").unlink()
    mutant = crash_points(act, recover, prepare=prepare)
    print(mutant)
    assert any("duplicated" in failure for failure in mutant.failures)


# the checker by itself: each kind of violation, from the smallest history that has it


def _journal(*entries: Entry) -> Journal:
    journal = Journal()
    for entry in entries:
        journal.note(entry)
    return journal


ASKED = (Entry("p", "invoke", "k"), Entry("p", "ok", "k", "1"))
DONE = Final("1", "k", State.DONE)
ONCE = Effect("k", "1", 2)


@pytest.mark.parametrize(
    ("entries", "effects", "finals", "kinds"),
    [
        (ASKED, [ONCE], [DONE], []),
        (ASKED, [], [Final("1", "k", State.DEAD)], []),
        (ASKED[:1], [], [], []),
        (ASKED, [], [], ["lost"]),
        (ASKED, [], [DONE], ["lost"]),
        (ASKED, [], [Final("1", "k", State.DONE, has_effect=False)], []),
        (ASKED, [ONCE, ONCE], [DONE], ["duplicated"]),
        (ASKED, [ONCE], [DONE, Final("2", "k", State.SCHEDULED)], ["duplicated", "stuck"]),
        (ASKED, [ONCE], [DONE, Final("2", "k", State.DISCARDED)], []),
        ((), [ONCE], [DONE], ["phantom", "phantom"]),
        ((ASKED[0], Entry("p", "fail", "k")), [ONCE], [DONE], ["phantom", "phantom"]),
        ((ASKED[0], Entry("p", "unknown", "k")), [ONCE], [DONE], []),
        ((*ASKED, Entry("w", "claim", "", "1", 3)), [Effect("k", "1", 2, position=3)], [DONE], ["stale"]),
        ((*ASKED, Entry("w", "claim", "", "1", 3)), [Effect("k", "1", 2, position=2)], [DONE], []),
        (ASKED, [Effect("k", "1", 3), Effect("other", "1", 2)], [DONE], ["phantom", "stale"]),
        (ASKED, [ONCE], [Final("1", "k", State.DEAD)], ["torn"]),
        (ASKED, [], [Final("1", "k", State.LEASED)], ["stuck"]),
    ],
)
def test_the_checker_finds_exactly_this(
    entries: Sequence[Entry], effects: Sequence[Effect], finals: Sequence[Final], kinds: Sequence[str]
) -> None:
    report = check(_journal(*entries), effects, finals)
    assert [violation.kind for violation in report.violations] == list(kinds), report
    assert bool(report) == bool(kinds)


def test_a_report_shows_only_the_entries_that_concern_the_violation() -> None:
    journal = _journal(*ASKED, Entry("p", "invoke", "other"), Entry("w", "claim", "", "1", 2))
    text = str(check(journal, [ONCE, ONCE], [DONE]))
    assert "duplicated: k: its effect happened 2 times" in text
    assert "p: ok k 1" in text
    assert "w: claim  1 fence 2" in text
    assert "other" not in text


def test_a_journal_survives_the_process_that_kept_it() -> None:
    written: list[bytes] = []
    kept = Journal(written.append)
    kept.invoke("p", "k")
    kept.ok("p", "k", "1")
    read = Journal()
    read.read(b"".join(written) + b'{"client":"p","ev')  # the process died in the middle of a line
    assert read.entries == kept.entries == list(ASKED)
