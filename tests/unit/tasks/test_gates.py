"""Gates as tasks declare them and workers observe them: limits, lines, sequence numbers, turns."""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest

from onefold import App, ConfigurationError, Context, Rate, Reject, Run, State, limits
from onefold.clock import give_way
from onefold.errors import SequenceGapError
from onefold.message.envelope import Envelope
from onefold.store import Query
from onefold.store.gates import Gating
from onefold.testing import FakeClock, HastyClock, drain

VAIN_SECONDS = 5
#: A scenario takes a fraction of a second; one that hangs ends here.
SECONDS_MAX = 60


def scenario(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), SECONDS_MAX))

    return run


@pytest.fixture
def clock() -> FakeClock:
    return HastyClock()


@pytest.fixture
def url(store_url: str) -> str:
    """The URL of a migrated store."""
    asyncio.run(App(store_url).migrate())
    return store_url


@pytest.fixture
def app(url: str, clock: FakeClock) -> App:
    return App(url, clock=clock)


class Busy:
    """Counts runs at the same time; the first ones wait until there are ``full`` of them, or for a while."""

    def __init__(self, full: int = 0) -> None:
        self.now: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.order: list[Any] = []
        self._full = full
        self._reached = asyncio.Event()

    async def run(self, name: str = "", what: Any = None) -> None:
        self.now[name] += 1
        self.most[name] = max(self.most[name], self.now[name])
        self.most["all"] = max(self.most["all"], self.now.total())
        self.order.append(what)
        if self.now.total() >= self._full:
            self._reached.set()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._reached.wait(), VAIN_SECONDS)
        await give_way()
        self.now[name] -= 1


def noop() -> None: ...


# declaring


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"gate": "{a}", "fair_key": "{a}"}, "exclude each other"),
        ({"ordering_key": "{a}", "fair_key": "{a}"}, "exclude each other"),
        ({"max_running_each": 2}, "need a key"),
        ({"rate_each": Rate(1)}, "need a key"),
        ({"gate": "{a}"}, "no limit"),
        ({"gate": "{b}", "max_running": 1}, "names 'b'"),
        ({"ordering_key": "{a}", "priority": 1}, "no priority"),
        ({"ordering_key": "{a}", "max_running_each": 1}, "one run at a time"),
        ({"max_running": 0}, "must be from 1"),
        ({"priority": 10}, "from 0 to 9"),
        ({"gate_name": "x"}, "without limits"),
        ({"gate_name": "X", "max_running": 1}, "not allowed"),
        ({"ordering_key": "{a}", "on_failure": "panic"}, "on_failure"),
        ({"ordering_key": "{a}", "gap": "panic"}, "gap"),
        ({"ordering_key": "{a}", "gap_after": timedelta(days=8)}, "gap_after"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], match: str) -> None:
    """F2 to F7: when the task is declared, with the remedy."""
    with pytest.raises(ConfigurationError, match=match):

        @App("sqlite:///:memory:").task(**settings)
        async def handle(a: int) -> None: ...


@pytest.mark.parametrize(("given", "match"), [((0,), "count"), ((1, 0), "per"), ((1, 1, 0), "burst")])
def test_a_rate_is_checked(given: tuple[int, ...], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        Rate(*given)


def test_tasks_that_share_a_gate_declare_the_same_limits() -> None:
    app = App("sqlite:///:memory:")
    app.task(name="a", gate_name="stripe", max_running=5)(noop)
    app.task(name="b", gate_name="stripe", max_running=5)(noop)
    with pytest.raises(ConfigurationError, match="other limits"):
        app.task(name="c", gate_name="stripe", max_running=6)(noop)


def test_a_message_names_the_gate_at_which_it_waits() -> None:
    app = App("sqlite:///:memory:")

    def envelope(settings: dict[str, Any], **options: Any) -> Envelope:
        task = App("sqlite:///:memory:").task(name="t", **settings)(lambda a: None)
        return task.options(**options).call("x").envelope("id")

    def where(settings: dict[str, Any], **options: Any) -> tuple[Any, ...]:
        e = envelope(settings, **options)
        return e.gated_by, e.ordering_key, e.priority

    assert where({}) == (None, None, 0)
    assert where({"max_running": 1}) == ("t:", None, 0)
    assert where({"gate": "{a}", "max_running_each": 1}) == ("t:x", None, 0)
    assert where({"fair_key": "{a}", "priority": 3}) == ("t:x", None, 3)
    assert where({"ordering_key": "{a}"}) == ("t:x", "x", 0)
    assert where({"ordering_key": "{a}", "gate_name": "g"}) == ("g:x", "x", 0)
    assert where({}, ordering_key="y") == ("t:y", "y", 0)
    assert where({"max_running": 1}, ordering_key="y", sequence=1) == ("t:y", "y", 0)
    assert where({"priority": 2}, priority=9) == (None, None, 9)
    for settings, options in (
        ({"gate": "{a}", "max_running_each": 1}, {"ordering_key": "y"}),
        ({"ordering_key": "{a}"}, {"priority": 1}),
        ({}, {"sequence": 1}),
        ({}, {"priority": 10}),
    ):
        with pytest.raises(ConfigurationError):
            envelope(settings, **options)
    assert app.tasks == {}


# limits


@scenario
async def test_a_cap_holds_over_workers_and_is_reached(app: App) -> None:
    """F2."""
    busy = Busy(full=3)

    @app.task(max_running=3)
    async def charge(n: int) -> None:
        await busy.run()

    async with app:
        await app.send_many(charge.call(n) for n in range(30))
        assert sum(await asyncio.gather(*(app.work(until_idle=True) for _ in range(4)))) == 30
    assert busy.most[""] == 3


@scenario
async def test_caps_of_each_key_and_of_all_hold_together(app: App) -> None:
    """F2: per key."""
    busy = Busy(full=5)

    @app.task(gate="{tenant}", max_running=5, max_running_each=2)
    async def call(tenant: str) -> None:
        await busy.run(tenant)

    async with app:
        await app.send_many(call.call(tenant) for tenant in "abcd" * 6)
        assert await app.work(until_idle=True, concurrency=20) == 24
    assert busy.most["all"] == 5
    assert max(busy.most[tenant] for tenant in "abcd") == 2


@scenario
async def test_tasks_share_the_places_of_one_gate(app: App) -> None:
    busy = Busy(full=2)

    @app.task(gate_name="stripe", max_running=2)
    async def charge(n: int) -> None:
        await busy.run()

    @app.task(gate_name="stripe", max_running=2)
    async def refund(n: int) -> None:
        await busy.run()

    async with app:
        await app.send_many([*(charge.call(n) for n in range(5)), *(refund.call(n) for n in range(5))])
        assert await app.work(until_idle=True) == 10
    assert busy.most[""] == 2


@scenario
async def test_a_full_gate_does_not_hold_up_others(app: App) -> None:
    busy = Busy()

    @app.task(max_running=1)
    async def slow(n: int) -> None:
        await busy.run("slow", "slow")

    @app.task
    async def quick(n: int) -> None:
        busy.order.append("quick")

    async with app:
        await app.send_many([*(slow.call(n) for n in range(5)), *(quick.call(n) for n in range(50))])
        assert await app.work(until_idle=True, concurrency=2) == 55
    assert busy.most["slow"] == 1
    assert busy.order.index("quick") < 5


@scenario
async def test_a_rate_spreads_starts_over_time(app: App, clock: FakeClock) -> None:
    """F5."""
    at: list[int] = []

    @app.task(rate=Rate(2, per=10, burst=1))
    async def call(n: int) -> None:
        at.append(clock.now())

    async with app:
        began = clock.now()
        await app.send_many(call.call(n) for n in range(4))
        assert await drain(app) == 4
    gaps = [later - earlier for earlier, later in pairwise(at)]
    assert at[0] == began
    assert min(gaps) >= 5_000_000


@scenario
async def test_a_worker_that_waits_for_tokens_looks_when_one_can_be_there(url: str) -> None:
    """F5: ten in half a second, not one in a second."""
    app, done = App(url), asyncio.Event()
    left = 10

    @app.task(rate=Rate(20, per=1, burst=1))
    async def call(n: int) -> None:
        nonlocal left
        left -= 1
        if not left:
            done.set()

    async with app:
        await app.send_many(call.call(n) for n in range(10))
        working = asyncio.create_task(app.work())
        await asyncio.wait_for(done.wait(), 5)
        app.stop_working()
        await working


@scenario
async def test_a_message_sent_before_there_was_a_limit_is_limited_too(url: str, clock: FakeClock) -> None:
    """F2: across a deployment, without using up an attempt; they join the line in the order of their claims."""
    before, after = App(url, clock=clock), App(url, clock=clock)
    busy = Busy()
    attempts: list[int] = []

    @before.task(name="job")
    async def old(key: str, n: int) -> None:
        raise AssertionError("no worker runs for this app")

    @after.task(name="job", ordering_key="{key}")
    async def new(ctx: Context, key: str, n: int) -> None:
        attempts.append(ctx.attempt)
        await busy.run(key, (key, n))

    async with before, after:
        for n in range(3):
            await before.send_many(old.call(key, n) for key in "ab")
            clock.advance(1)
        await after.send_many(new.call(key, 3) for key in "ab")
        await drain(after)
    assert (busy.most["a"], busy.most["b"]) == (1, 1)
    assert [n for key, n in busy.order if key == "a" and n < 3] == [0, 1, 2]
    assert set(attempts) == {1}


# lines


@scenario
async def test_one_key_runs_in_order_and_keys_run_beside_each_other(app: App) -> None:
    """F4."""
    busy = Busy(full=3)

    @app.task(ordering_key="{account}")
    async def post(account: str, n: int) -> None:
        await busy.run(account, (account, n))

    async with app:
        await app.send_many(post.call(account, n) for n in range(5) for account in "abc")
        await asyncio.gather(*(app.work(until_idle=True) for _ in range(3)))
    assert busy.most == {"a": 1, "b": 1, "c": 1, "all": 3}
    assert [[n for account, n in busy.order if account == one] for one in "abc"] == [[0, 1, 2, 3, 4]] * 3


@pytest.mark.parametrize(("on_failure", "order"), [("hold", [0, 0, 1, 2]), ("skip", [0, 1, 2, 0])])
@scenario
async def test_a_failed_message_holds_its_line_or_not(app: App, on_failure: Any, order: list[int]) -> None:
    """F4: as declared."""
    seen: list[int] = []

    @app.task(ordering_key="{account}", on_failure=on_failure)
    async def post(account: str, n: int) -> None:
        seen.append(n)
        if seen.count(0) == 1 and n == 0:
            raise ValueError("not yet")

    async with app:
        await app.send_many(post.call("a", n) for n in range(3))
        await drain(app)
    assert seen == order


@scenario
async def test_a_dead_letter_does_not_hold_its_line(app: App) -> None:
    seen: list[int] = []

    @app.task(ordering_key="{account}")
    async def post(account: str, n: int) -> None:
        seen.append(n)
        if n == 0:
            raise Reject("never")

    async with app:
        await app.send_many(post.call("a", n) for n in range(3))
        await drain(app)
    assert seen == [0, 1, 2]


@scenario
async def test_a_run_that_waits_holds_its_key_and_takes_no_place(app: App) -> None:
    """F2, F4: for workflows."""
    seen: list[str] = []

    @app.workflow(ordering_key="{account}", max_running=1)
    async def onboard(run: Run, account: str, n: int) -> None:
        seen.append(f"{account}{n}")
        await run.sleep(days=1)

    async with app:
        await app.send_many(onboard.call(account, n) for n in range(2) for account in "ab")
        await app.work(until_idle=True)
        assert sorted(seen) == ["a0", "b0"]
        await drain(app)
    assert sorted(set(seen)) == ["a0", "a1", "b0", "b1"]


# sequence numbers


@scenario
async def test_numbers_decide_and_a_missing_one_is_waited_for(app: App) -> None:
    """A12: wait."""
    seen: list[int] = []

    @app.task(ordering_key="{account}")
    async def post(account: str, n: int) -> None:
        seen.append(n)

    async with app:
        for n in (2, 3):
            await post.options(sequence=n).send("a", n)
        await app.work(until_idle=True)
        assert seen == []
        await post.options(sequence=1).send("a", 1)
        await app.work(until_idle=True)
    assert seen == [1, 2, 3]


@scenario
async def test_a_message_that_waits_too_long_for_a_missing_number_is_a_dead_letter(app: App, clock: FakeClock) -> None:
    """A12: wait, then the dead letter; those behind it go on, and it can be redriven."""
    seen: list[int] = []

    @app.task(ordering_key="{account}", gap_after=timedelta(seconds=10))
    async def post(account: str, n: int) -> None:
        seen.append(n)

    async with app:
        for n in (2, 3):
            await post.options(sequence=n).send("a", n)
        clock.advance(11)
        await app.work(until_idle=True)
        (letter,) = [one async for one in app.dead_letters()]
        assert (letter.failure.reason, seen) == ("gap", [3])
        await letter.redrive(actor="ada", reason="the first will not come")
        await app.work(until_idle=True)
    assert seen == [3, 2]


@scenario
async def test_a_gap_may_be_retried_by_the_policy(app: App) -> None:
    """A12: retry later."""
    seen: list[int] = []

    @app.task(ordering_key="{account}", gap="retry")
    async def post(account: str, n: int) -> None:
        seen.append(n)

    async with app:
        second = await post.options(sequence=2).send("a", 2)
        await app.work(until_idle=True)
        (failed,) = await app.store.attempts(second.id)
        assert failed.failure.error_type == f"{SequenceGapError.__module__}.SequenceGapError"
        await post.options(sequence=1).send("a", 1)
        await drain(app)
    assert seen == [1, 2]


@scenario
async def test_a_gap_may_be_skipped(app: App) -> None:
    """A12: skip."""
    seen: list[int] = []

    @app.task(ordering_key="{account}", gap="skip")
    async def post(account: str, n: int) -> None:
        seen.append(n)

    async with app:
        for n in (5, 3, 9):
            await post.options(sequence=n).send("a", n)
        await app.work(until_idle=True)
    assert seen == [3, 5, 9]


# turns


@scenario
async def test_a_tenant_with_much_to_do_does_not_keep_others_waiting(app: App) -> None:
    """F6."""
    seen: list[str] = []

    @app.task(fair_key="{tenant}")
    async def work(tenant: str) -> None:
        seen.append(tenant)

    async with app:
        await app.send_many(work.call("large") for _ in range(500))
        await app.send_many(work.call("small") for _ in range(3))
        await app.work(until_idle=True, concurrency=4)
    assert max(n for n, tenant in enumerate(seen) if tenant == "small") < 12


@scenario
async def test_priority_decides_and_ages(app: App, clock: FakeClock) -> None:
    """F7."""
    seen: list[str] = []

    @app.task
    async def work(name: str) -> None:
        seen.append(name)

    async with app:
        await work.send("old")
        clock.advance(limits.PRIORITY_MAX * limits.PRIORITY_STEP_SECONDS + 1)
        await work.send("plain")
        await work.options(priority=5).send("five")
        await work.options(priority=9).send("nine")
        await app.work(until_idle=True, concurrency=1)
        assert await app.find(Query(states=(State.SCHEDULED,))) == []
    assert seen == ["old", "nine", "five", "plain"]


# places of queues


@scenario
async def test_a_queue_may_have_fewer_places_than_its_worker(app: App) -> None:
    """F1."""
    busy = Busy(full=limits.CONCURRENCY)

    @app.task(queue="mail")
    async def mail(n: int) -> None:
        await busy.run("mail")

    @app.task
    async def other(n: int) -> None:
        await busy.run("other")

    async with app:
        await app.send_many([*(mail.call(n) for n in range(8)), *(other.call(n) for n in range(8))])
        assert await app.work(queues=["mail:2", "default"], until_idle=True) == 16
    assert busy.most["mail"] == 2
    assert busy.most["other"] == limits.CONCURRENCY - 2


@pytest.mark.parametrize("queue", ["mail:", "mail:x", "mail:0", ":2", "mail:2:3"])
@scenario
async def test_places_of_queues_are_checked(app: App, queue: str) -> None:
    async with app:
        with pytest.raises(ConfigurationError):
            await app.work(queues=[queue], until_idle=True)


# the database's own constraint


@scenario
async def test_the_database_itself_refuses_a_second_lease_in_a_line(app: App) -> None:
    """F4: a unique index backs the rule that only the first is claimed."""

    @app.task(ordering_key="{account}")
    async def post(account: str) -> None: ...

    await app.migrate()
    async with app:
        await app.send_many(post.call("a") for _ in range(2))
        table = "onefold.delivery" if app.store.capabilities.shared else "onefold_delivery"
        with pytest.raises(Exception, match=r"(?i)unique"):
            async with app.transaction() as tx:
                await tx.execute(f"UPDATE {table} SET state = 1, lease_until = 1, worker = 'two at once'")
        assert await app.work(until_idle=True) == 2


@scenario
async def test_a_due_message_does_not_wait_behind_keys_that_are_not_due(
    url: str, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One claim finds the due message although more keys than it may examine one by one are not due."""
    monkeypatch.setattr(limits, "GATES_PER_CLAIM", 16)
    app = App(url, clock=clock)

    @app.task(fair_key="{user}")
    async def remind(user: str) -> None: ...

    async with app:
        await app.send_many(remind.options(delay=3_600).call(f"u{number:03}") for number in range(200))
        for user in ("u000", "u199", "u100", "u099"):
            sent = await remind.send(user)
            leases = await app.store.claim(
                ["default"], types=["remind"], limit=1, lease=30, worker="w", gatings={"remind": Gating(name="remind")}
            )
            assert [lease.id for lease in leases] == [sent.id]
