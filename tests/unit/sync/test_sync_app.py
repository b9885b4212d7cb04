"""``SyncApp``: the methods of an app for code without an event loop."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from onefold import (
    App,
    AppTransaction,
    Batch,
    ConfigurationError,
    DeadLetter,
    HandlerError,
    KeyReuseError,
    OnefoldError,
    Query,
    Receipt,
    ResultTimeoutError,
    RetryPolicy,
    Run,
    State,
    SyncApp,
    SyncBatch,
    SyncContext,
    SyncDeadLetter,
    SyncDebounced,
    SyncReceipt,
    SyncSchedule,
    SyncTask,
    SyncTopic,
    SyncTransaction,
    Task,
    Topic,
    TransactionOpenError,
)
from onefold.processes.load_app import load_app
from onefold.schedules.debounce import Debounced
from onefold.schedules.register import Schedule
from onefold.testing import HastyClock

ONCE = RetryPolicy(max_attempts=1)


@pytest.fixture
def clock() -> HastyClock:
    return HastyClock()


@pytest.fixture
def app(store_url: str, clock: HastyClock) -> Iterator[SyncApp]:
    """An app on each store in turn, with a table ``effect``."""
    made = SyncApp(store_url, clock=clock)
    made.migrate()
    with made.transaction() as tx:
        tx.execute("CREATE TABLE effect (name TEXT NOT NULL)")
    yield made
    made.close()


@pytest.fixture
def sqlite_app(sqlite_url: str, clock: HastyClock) -> Iterator[SyncApp]:
    made = SyncApp(sqlite_url, clock=clock)
    yield made
    made.close()


def effects(app: SyncApp) -> list[str]:
    with app.transaction() as tx:
        return [row[0] for row in tx.execute("SELECT name FROM effect ORDER BY name")]


# completeness


#: Members that stay asynchronous, and members that belong to workers and other machinery.
ELSEWHERE: dict[type, set[str]] = {
    App: {"announce", "dispatch", "fresh_id", "open_resources", "prepare", "store", "work_as"},
    AppTransaction: {"add_signal", "add_start", "connection", "refuse"},
    Receipt: {"confirm", "withhold"},
    DeadLetter: set(),
    Schedule: set(),
    Debounced: {"carry"},
    Task: {"adopts", "make_call", "pinned", "saga", "understands", "has_key", "key_of", "read", "fingerprint_of"},
    Topic: {"adopts", "make_call", "pinned", "saga", "understands", "has_key", "key_of", "read", "fingerprint_of"},
}
#: Members that only the synchronous side has: access to tasks declared on the app behind it, and that app.
ADDED: dict[type, set[str]] = {
    SyncApp: {"app", "send"},
    SyncTask: {"name"},
    SyncTopic: {"name"},
    SyncSchedule: {"name"},
}

PAIRS = [
    (App, SyncApp),
    (AppTransaction, SyncTransaction),
    (Receipt, SyncReceipt),
    (DeadLetter, SyncDeadLetter),
    (Schedule, SyncSchedule),
    (Debounced, SyncDebounced),
    (Task, SyncTask),
    (Topic, SyncTopic),
]


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


@pytest.mark.parametrize(("theirs", "ours"), PAIRS, ids=lambda kind: kind.__name__)
def test_every_verb_is_there_with_the_same_parameters(theirs: type, ours: type) -> None:
    """P6: a method that is added on one side and forgotten on the other fails here."""
    assert public(theirs) - ELSEWHERE[theirs] == public(ours) - ADDED.get(ours, set())
    for name in public(theirs) & public(ours):
        one, other = inspect.getattr_static(theirs, name), inspect.getattr_static(ours, name)
        assert isinstance(one, property) == isinstance(other, property), name
        if inspect.isfunction(one):
            expected = [(p.name, p.kind, p.default) for p in inspect.signature(one).parameters.values()]
            found = [(p.name, p.kind, p.default) for p in inspect.signature(other).parameters.values()]
            assert expected == found, name
            assert not inspect.iscoroutinefunction(other), name


def test_it_is_made_like_an_app() -> None:
    """P6: with the same parameters, or with an app itself."""
    assert list(inspect.signature(App).parameters) == list(inspect.signature(SyncApp).parameters)


# sending


def test_a_task_is_sent_run_and_its_result_waited_for(app: SyncApp) -> None:
    """P6: from the send to the result, with a plain function."""

    @app.task(key="{order}")
    def charge(ctx: SyncContext, order: int) -> str:
        ctx.execute("INSERT INTO effect (name) VALUES ('charged')")
        return f"charged {order}"

    first, second = charge.send(7), charge.send(7)
    assert (first.duplicate, second.duplicate, second.id) == (False, True, first.id)
    assert first.state is State.SCHEDULED
    with pytest.raises(ResultTimeoutError):
        first.result(timeout=0)
    assert app.work(until_idle=True) == 1
    assert (first.result(), second.result(timeout=1)) == ("charged 7", "charged 7")
    assert effects(app) == ["charged"]
    assert not any(counts.scheduled for counts in app.count().values())
    with pytest.raises(TypeError):
        charge.send()  # type: ignore[call-arg]


def test_many_are_sent_in_one_commit(app: SyncApp) -> None:
    """B12: all or none."""

    @app.task(key="{number}")
    def count(number: int, text: str = "") -> int:
        return number

    receipts = app.send_many((count.call(number) for number in range(3)), batch_key="batch")
    assert [one.id for one in app.send_many([count.call(n) for n in range(3)], batch_key="batch")] == [
        one.id for one in receipts
    ]
    with pytest.raises(KeyReuseError):
        app.send_many([count.call(9), count.call(1, "another payload")])
    assert len(app.find(Query())) == 3


def test_options_stay_with_the_task(app: SyncApp, clock: HastyClock) -> None:
    """P1."""

    @app.task
    def later() -> None: ...

    bound = later.options(delay=60).options(key="k")
    assert (bound.name, repr(bound)) == ("later", "<task later>")
    sent = bound.send()
    assert app.work(until_idle=True) == 0
    clock.advance(60)
    assert app.work(until_idle=True) == 1
    assert (app.find(Query(ids=(sent.id,)))[0].envelope.idempotency_key, repr(sent)) == ("k", f"<receipt {sent.id}>")


def test_rows_and_messages_of_a_transaction_leave_together(app: SyncApp) -> None:
    """J1: by tx.send, tx.send_many, tx.add and a plain send inside the block."""

    @app.task
    def note(name: str) -> None: ...

    with app.transaction() as tx:
        tx.execute("INSERT INTO effect (name) VALUES ('row')")
        assert tx.fetch("SELECT name FROM effect") == [("row",)]
        receipts = [tx.send(note, "a"), *tx.send_many([note.call("b")]), tx.add(note.call("c")), note.send("d")]
        with pytest.raises(TransactionOpenError):
            assert receipts[0].duplicate
        with pytest.raises(TransactionOpenError), app.transaction():
            pass
        with pytest.raises(TransactionOpenError):
            app.redrive(["x"], actor="ada", reason="inside")
    assert [one.duplicate for one in receipts] == [False] * 4
    assert (effects(app), len(app.find(Query()))) == (["row"], 4)


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), SystemExit(1), GeneratorExit()], ids=repr)
def test_a_transaction_that_raises_leaves_nothing(app: SyncApp, error: BaseException) -> None:
    """J1: the exception is raised unchanged, and the app continues to work."""

    @app.task
    def note() -> None: ...

    def write() -> None:
        with app.transaction() as tx:
            tx.execute("INSERT INTO effect (name) VALUES ('undone')")
            tx.send(note)
            raise error

    with pytest.raises(type(error)) as caught:
        write()
    assert caught.value is error
    assert (effects(app), app.find(Query())) == ([], [])


def test_a_transaction_that_cannot_begin_says_why(sqlite_app: SyncApp) -> None:
    """P3: the SQLite store cannot join a caller's connection."""
    with pytest.raises(ConfigurationError, match="cannot join"), sqlite_app.transaction(connection=object()):
        pass


# handlers


def test_handlers_of_every_kind_can_be_declared(app: SyncApp) -> None:
    """P6: plain functions, coroutine functions, batches, workflows."""

    @app.task
    def plain(ctx: SyncContext, number: int) -> int:
        inner.send(number)
        app.send(inner, number)
        return number

    @app.task(queue="other")
    async def inner(number: int) -> int:
        return number * 2

    @app.task(batch=5)
    def many(batch: SyncBatch[int]) -> None:
        for item in batch:
            item.done(item.value)

    @app.task(batch=5)
    async def many_awaited(batch: Batch[int]) -> None:
        for item in batch:
            item.done(item.value)

    @app.workflow
    async def journey(run: Run, number: int) -> int:
        return await run.step(double, number)

    @app.step
    def double(number: int) -> int:
        return number * 2

    receipts = [plain.send(1), many.send(2), many_awaited.send(3), journey.send(4)]
    app.work(until_idle=True)
    assert [one.result() for one in receipts] == [1, 2, 3, 8]
    inner_ones = [one for one in app.find(Query()) if one.envelope.message_type == "inner"]
    assert {one.envelope.causation_id for one in inner_ones} == {receipts[0].id}
    assert len(inner_ones) == 2
    assert [step.name for step in app.journal(receipts[3].id)] == ["double#1"]


def test_the_app_can_be_used_from_its_own_handlers(app: SyncApp) -> None:
    """P6: calls that would commit apart are refused, as for coroutines; the others work."""
    seen: list[Any] = []

    @app.task(retry=ONCE)
    def looks(ctx: SyncContext) -> None:
        seen.append(len(app.find(Query())))
        with pytest.raises(TransactionOpenError), app.transaction():
            pass
        ctx.execute("INSERT INTO effect (name) VALUES ('row')")
        with pytest.raises(TransactionOpenError):
            app.cancel(ctx.message.id, actor="ada", reason="inside")

    @app.task(retry=ONCE)
    async def would_wait_for_itself() -> None:
        with pytest.raises(HandlerError, match="await the asynchronous verb"):
            app.find(Query())
        seen.append("refused")

    receipts = [looks.send(), would_wait_for_itself.send()]
    app.work(until_idle=True)
    assert [app.find(Query(ids=(one.id,)))[0].state for one in receipts] == [State.DONE, State.DONE]
    assert (sorted(map(str, seen)), effects(app)) == (["2", "refused"], ["row"])


def test_it_can_be_made_around_an_app(sqlite_url: str) -> None:
    """P6: tasks declared on an ``App`` are sent through it, and its own on the app."""
    behind = App(sqlite_url)

    @behind.task
    async def declared_there(number: int) -> int:
        return number

    door = SyncApp(behind)

    @door.task
    def declared_here(number: int) -> int:
        return number

    with door:
        receipts = [door.send(declared_there, 1), door.send(declared_there.options(key="k"), number=2)]
        receipts += [door.send(declared_here, 3), declared_here.send(4)]
        door.work(until_idle=True)
        assert [one.result() for one in receipts] == [1, 2, 3, 4]
        assert sorted(door.tasks) == sorted(behind.tasks) == ["declared_here", "declared_there"]
        assert door.url == sqlite_url


def test_the_command_line_takes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """N2: ``onefold worker shop:app`` works for the app behind it."""
    (tmp_path / "sync_shop.py").write_text("from onefold import SyncApp\napp = SyncApp('sqlite:///shop.db')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert load_app("sync_shop:app").url == "sqlite:///shop.db"


# operators


def test_dead_letters_are_a_plain_iterator(app: SyncApp) -> None:
    """D5, D6: read, redriven and discarded."""
    broken = True

    @app.task(retry=ONCE)
    def fails(number: int) -> int:
        if broken:
            raise ValueError("no")
        return number

    receipts = app.send_many(fails.call(number) for number in range(3))
    app.work(until_idle=True)
    letters = {letter.id: letter for letter in app.dead_letters(queue="default", message_type="fails")}
    assert set(letters) == {one.id for one in receipts}
    first, second, third = (letters[one.id] for one in receipts)
    assert (first.failure.error_type, first.crashes, first.replay_count) == ("ValueError", 0, 0)
    assert first.as_dict()["error_type"] == "ValueError"
    assert [attempt.attempt for attempt in first.attempts()] == [1]
    broken = False
    assert first.redrive(actor="ada", reason="fixed")
    assert not first.redrive(actor="ada", reason="fixed")
    assert second.discard(actor="ada", reason="not needed")
    assert app.redrive([third.id], actor="ada", reason="fixed") == [third.id]
    app.work(until_idle=True)
    assert (receipts[0].result(), receipts[2].result(), list(app.dead_letters())) == (0, 2, [])
    assert "fails" in repr(first)


def test_messages_are_cancelled(app: SyncApp) -> None:
    """G4."""

    @app.task
    def never() -> None: ...

    sent = never.options(delay=60).send()
    assert app.cancel(sent.id, actor="ada", reason="changed my mind")
    assert app.find(Query(ids=(sent.id,)))[0].state is State.CANCELLED


def test_schedules_are_made_looked_at_and_removed(app: SyncApp, clock: HastyClock) -> None:
    """E1: at run time and in code."""
    ran: list[str] = []

    @app.recurring(every=60, mode="rate")
    def tick(name: str = "declared") -> None:
        ran.append(name)

    made = app.schedule(tick.call("made"), every=60, mode="rate", name="made")
    assert (made.name, made.drift, len(made.preview(3))) == ("made", None, 3)
    assert made.pause()
    assert made.resume()
    assert made.run_now()
    app.work(until_idle=True)
    clock.advance(61)
    app.work(until_idle=True)
    assert {"declared", "made"} <= set(ran)
    assert app.schedules()["made"].as_dict()["name"] == "made"
    assert "made" in repr(made)
    assert app.schedules()["made"].remove()
    assert not app.unschedule("made")


def test_triggers_become_one_message(app: SyncApp, clock: HastyClock) -> None:
    """B5: for a task declared on either side."""
    ran: list[int] = []

    @app.task
    def refresh(page: int, version: int) -> None:
        ran.append(version)

    quiet = app.debounce(refresh, key="{page}", wait=5, at_most=60)
    assert [quiet.trigger(1, version) > clock.moment for version in range(3)] == [True] * 3
    for _ in range(3):
        app.work(until_idle=True)
        clock.advance(5)
    assert ran == [2]
    with pytest.raises(ConfigurationError, match="has options"):
        app.debounce(refresh.options(delay=5), key="{page}", wait=5, at_most=60)


def test_runs_of_workflows_are_signalled_and_looked_after(app: SyncApp) -> None:
    """H4, B20."""

    @app.workflow(version=2)
    async def waits(run: Run) -> str:
        return await run.signal("go", type=str)

    @app.task(retry=ONCE)
    def charges(ctx: SyncContext) -> str:
        return ctx.once("charge", charge)

    def charge() -> str:
        raise ConnectionError("lost")

    waiting, charged = waits.send(), charges.send()
    app.work(until_idle=True)
    assert app.signal(waiting.id, "go", "on")
    with app.transaction() as tx:
        tx.signal(waiting.id, "go", "again", id="second")
    app.work(until_idle=True)
    assert waiting.result() == "on"
    assert app.restart(waiting.id, from_step="signal:go#1", actor="ada", reason="no") == []
    (entry,) = app.ledger(charged.id)
    assert (entry.name, entry.state) == ("charge", "uncertain")
    assert app.redrive([charged.id], actor="ada", reason="look")
    app.work(until_idle=True)
    assert app.resume(charged.id, actor="ada", reason="look again")
    app.work(until_idle=True)
    assert app.resolve(charged.id, "charge", happened=True, value="paid", actor="ada", reason="asked the bank")
    app.work(until_idle=True)
    assert charged.result() == "paid"


# its event loop


def test_the_event_loop_starts_with_the_first_verb_and_ends_with_close(sqlite_url: str) -> None:
    """Q3: a module that only declares tasks starts nothing."""

    def loops() -> int:
        return sum(thread.name == "onefold-loop" for thread in threading.enumerate())

    before = loops()
    app = SyncApp(sqlite_url)

    @app.task
    def noop() -> None: ...

    app.stop_working()
    app.close()
    assert loops() == before
    with app:
        assert loops() == before + 1
        noop.send()
    assert loops() == before
    with pytest.raises(ConfigurationError, match="was closed"):
        noop.send()
    with app:
        assert len(app.find(Query())) == 1


def test_many_threads_use_it_at_once(app: SyncApp) -> None:
    """Fault 41: including the very first call."""

    @app.task(key="{number}")
    def count(number: int) -> None: ...

    app.close()
    app._closed = False  # as if it had never been opened
    barrier = threading.Barrier(8)

    def send(thread: int) -> None:
        barrier.wait()
        for number in range(20):
            count.send(number if number % 2 else thread * 100 + number)
            with app.transaction() as tx:
                tx.send(count, thread * 1_000 + number)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(send, range(8)))
    counts = app.count()["default"]
    assert counts.scheduled == 10 + 8 * 10 + 8 * 20 - _shared()


def _shared() -> int:
    """Return how many of the numbers occur twice."""
    odd = {number for number in range(20) if number % 2}
    even = [thread * 100 + number for thread in range(8) for number in range(20) if number % 2 == 0]
    transactions = [thread * 1_000 + number for thread in range(8) for number in range(20)]
    return 10 + len(even) + len(transactions) - len(odd | set(even) | set(transactions))


def test_waiting_callers_get_an_error_when_the_app_is_closed(sqlite_url: str) -> None:
    """Fault 41: no caller waits for ever."""
    app = SyncApp(sqlite_url)

    @app.task
    def never() -> None: ...

    sent = never.send()
    waiting = threading.Event()
    errors: list[BaseException] = []

    def wait() -> None:
        waiting.set()
        try:
            sent.result()
        except OnefoldError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    waiting.wait()
    app.close()
    thread.join(30)
    assert not thread.is_alive()
    assert len(errors) == 1


def run_program(tmp_path: Path, program: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "ONEFOLD_URL": f"sqlite:///{tmp_path}/app.db"}
    return subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_fork_after_first_use_is_refused(tmp_path: Path) -> None:
    """Fault 41: a typed error in the child, and the parent continues."""
    process = run_program(
        tmp_path,
        "import os\n"
        "from onefold import Query, StoreError, SyncApp\n"
        "app = SyncApp()\n"
        "@app.task\n"
        "def noop() -> None: ...\n"
        "if os.fork() == 0:\n"
        "    noop.send()\n"  # before first use a fork is harmless
        "    app.close()\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        "noop.send()\n"
        "if os.fork() == 0:\n"
        "    refused = 0\n"
        "    for verb in (noop.send, app.count, app.close, app.open):\n"
        "        try:\n"
        "            verb()\n"
        "        except StoreError:\n"
        "            refused += 1\n"
        "    os._exit(refused)\n"
        "_, status = os.wait()\n"
        "print(os.waitstatus_to_exitcode(status), len(app.find(Query())))\n"
        "app.close()\n",
    )
    printed, errors = process.communicate(timeout=60)
    assert (printed.split(), process.returncode) == (["4", "2"], 0), errors


@pytest.mark.parametrize("signals", [1, 2])
def test_ctrl_c_stops_the_work_gracefully(tmp_path: Path, signals: int) -> None:
    """C30, fault 40: running handlers may finish, then the interrupt is raised; a second one does not wait."""
    process = run_program(
        tmp_path,
        "import signal, threading\n"
        "from onefold import Query, SyncApp\n"
        # A test runner in the background may have inherited an ignored signal.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "app = SyncApp()\n"
        "release = threading.Event()\n"
        "@app.task\n"
        "def slow() -> None:\n"
        "    print('running', flush=True)\n"
        "    release.wait()\n"
        "slow.send()\n"
        "stop = app.stop_working\n"
        "def stopping() -> None:\n"
        "    stop()\n"
        "    print('stopping', flush=True)\n"
        f"    if {signals} == 1: release.set()\n"
        "app.stop_working = stopping\n"
        "try:\n"
        "    app.work()\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted', flush=True)\n"
        f"if {signals} == 1:\n"
        "    print(app.find(Query())[0].state.name, flush=True)\n",
    )
    assert process.stdout is not None
    lines: list[str] = []
    try:
        assert process.stdout.readline() == "running\n"
        process.send_signal(signal.SIGINT)
        lines.append(process.stdout.readline())
        if signals == 2:
            process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    expected = ["interrupted", "DONE"] if signals == 1 else ["interrupted"]
    assert (lines, rest.split()) == (["stopping\n"], expected), errors


def test_an_interrupted_wait_ends_what_it_waited_for(sqlite_app: SyncApp, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 41: nothing is left running on the event loop for a caller that is gone."""
    ended = threading.Event()

    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    sqlite_app.open()
    with monkeypatch.context() as patch:
        patch.setattr(Future, "result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sqlite_app._loop_thread.run(endless())
    assert ended.wait(30)
