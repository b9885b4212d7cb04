"""Tests of the checkers: each defect put in on purpose is found, within a bounded number of tries."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from onefold import App, Context, State, limits
from onefold.message.envelope import Envelope
from onefold.store import Lease, Outcome, PutOptions, Query, Stored
from onefold.store.journal_lines import Line, Note
from onefold.store.shared.rows import message_row
from onefold.store.sqlite import SQLiteStore
from onefold.store.sqlite import transaction as sqlite_transaction
from onefold.store.sqlite.numbers import give_numbers, rows_of
from onefold.store.sqlite.session import SQL, Session, as_json
from onefold.store.sqlite.verbs import journal as sqlite_steps
from onefold.store.sqlite.verbs.settle import settle
from onefold.testing import HastyClock, drain
from onefold.testing.checker import Effect, Entry, Final, Journal, check
from onefold.testing.crash import Point, crash_points
from onefold.testing.world.simulation import Kind, Simulation
from onefold.transactions.handler_transaction import HandlerTransaction
from onefold.workflows import children
from onefold.workflows.journal import Journal as RunJournal
from onefold.workflows.replay import Replay

#: A defect that takes more seeds than this would be missed too often by two thousand seeds.
SEEDS_MAX = 400


def _seed_that_finds(*kinds: str, world: Kind = "tasks") -> int:
    """Run seeds until one shows a violation of these kinds; return it."""
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
    """A handler's work is settled whether or not its lease is still held."""

    def unfenced(session: Session, settlements: Sequence[tuple[Lease, Outcome]]) -> None:
        numbers = rows_of(session, [lease for lease, _ in settlements])
        fences = {seq: fence for seq, _, fence, _ in session.rows("lease_fences", as_json(numbers))}
        for (lease, outcome), seq in zip(settlements, numbers, strict=True):
            if seq in fences:
                settle(session, [(msgspec.structs.replace(lease, fence=fences[seq]), outcome)])

    patch.setattr(sqlite_transaction, "settle_all", unfenced)


def _settle_after_the_commit(patch: pytest.MonkeyPatch) -> None:
    """The handler's rows are committed first, the outcome afterwards in its own transaction."""

    async def commit(self: HandlerTransaction, settlements: Sequence[tuple[Lease, Outcome]]) -> None:
        self._stop_limit()
        await self._leave(None)
        async with self._store.transaction() as transaction:
            await transaction.conclude(settlements)

    patch.setattr(HandlerTransaction, "commit", commit)


def _look_then_insert(patch: pytest.MonkeyPatch) -> None:
    """A read checks whether the key is taken; a moment later the insert does not check again."""

    def insert(session: Session, e: Envelope) -> Stored:
        (seq,), _ = give_numbers(session, [e])
        row = (e.scope, e.idempotency_key, 0, seq, e.fingerprint, e.schema_version, None)
        if not session.changes("put_key", [row]):
            session.run("take_key", *row)
        session.run("put_message", seq, *message_row(e, session.clock.now()))
        session.run("put_deliveries", as_json([seq]))
        return Stored(e.id, State.SCHEDULED)

    async def put(self: SQLiteStore, envelopes: Sequence[Envelope], options: PutOptions) -> list[Stored]:
        (e,) = envelopes
        look = "SELECT id FROM onefold_key JOIN onefold_message USING (seq) WHERE scope = ? AND key = ? AND kind = 0"
        for (first,) in await self.fetch(look, (e.scope, e.idempotency_key)):
            return [Stored(first, State.SCHEDULED, duplicate=True)]
        return [await self._write(lambda session: insert(session, e))]

    patch.setattr(SQLiteStore, "put", put)


def _forget_the_dead(patch: pytest.MonkeyPatch) -> None:
    """Leases that run out are never taken over."""
    patch.setitem(SQL, "claim_expired", SQL["claim_expired"].replace("WHERE", "WHERE 0 AND"))


def _answer_before_it_is_durable(patch: pytest.MonkeyPatch) -> None:
    """The sender gets its receipt while the message is still being written."""
    original = SQLiteStore.put

    async def put(self: SQLiteStore, envelopes: Sequence[Envelope], options: PutOptions) -> list[Stored]:
        async def write_later() -> None:
            await self._clock.sleep(0.1)
            await original(self, envelopes, options)

        self._late = asyncio.ensure_future(write_later())  # type: ignore[attr-defined]
        return [Stored(e.id, State.SCHEDULED) for e in envelopes]

    patch.setattr(SQLiteStore, "put", put)


def _send_before_the_commit(patch: pytest.MonkeyPatch) -> None:
    """The sends of a handler leave at once, even if the handler fails."""
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
    """Parking overlooks lines that were recorded since the claim."""
    patch.setitem(SQL, "settle_park", SQL["settle_park"].replace("wake < ?1", "?1 IS NOT NULL"))


def _let_a_late_reply_overwrite(patch: pytest.MonkeyPatch) -> None:
    """Of two lines with the same name the last one counts."""
    late = "ON CONFLICT (message_id, name, kind) DO UPDATE SET value = excluded.value"
    patch.setitem(SQL, "record_step", SQL["record_step"].replace("ON CONFLICT DO NOTHING", late))


def _take_a_signal_twice(patch: pytest.MonkeyPatch) -> None:
    """A wait receives the oldest signal, even if another wait has received it."""
    original = RunJournal.take_signal

    def take_signal(self: RunJournal, name: str, signal: str) -> Line | None:
        self._taken.clear()
        return original(self, name, signal)

    patch.setattr(RunJournal, "take_signal", take_signal)


def _forget_the_timer(patch: pytest.MonkeyPatch) -> None:
    """A sleeping run is parked without a due time."""
    patch.setattr(sqlite_steps, "_due_at", lambda outcome, now: limits.INSTANT_MAX)


def _record_a_step_apart(patch: pytest.MonkeyPatch) -> None:
    """The rows of a step are committed first, its record afterwards in its own transaction."""
    original = Replay._commit

    async def commit(
        self: Replay, lines: Sequence[Line], sends: Sequence[Envelope], notes: Sequence[Note], context: Context | None
    ) -> list[Line]:
        async def nothing(transaction: object) -> None: ...

        if context is not None and context.in_transaction:
            await context.commit_with(nothing)
        return await original(self, lines, sends, notes, None)

    patch.setattr(Replay, "_commit", commit)


def _let_any_child_answer(patch: pytest.MonkeyPatch) -> None:
    """A child sent before a restart answers for one sent after it."""
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


# the checker alone: each kind of violation, in the smallest history that has it


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
    read.read(b"".join(written) + b'{"client":"p","ev')  # the process died while it wrote a line
    assert read.entries == kept.entries == list(ASKED)
