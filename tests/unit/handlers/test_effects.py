"""The effect ledger: calls to the outside that are not made twice, and the fate of those with an unknown outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from onefold import (
    ConfigurationError,
    Context,
    DecodeError,
    HandlerError,
    Happened,
    NotHappened,
    Receipt,
    Reject,
    Retry,
    RetryPolicy,
    State,
    TransactionOpenError,
    UncertainError,
)
from onefold.store.journal_lines import LineKind

if TYPE_CHECKING:
    from tests.unit.conftest import Bench

#: Failed attempts are retried after a second of the fake clock.
QUICK = RetryPolicy(base=1.0, fixed=True)


class Provider:
    """The outside world: the calls it got, and how many of its successes it reports as a failure."""

    def __init__(self, *, deaf: int = 0, error: type[BaseException] = ConnectionError) -> None:
        self.calls: list[str] = []
        self.deaf = deaf
        self.error = error

    def charge(self, key: str) -> Callable[[], Awaitable[str]]:
        async def call() -> str:
            self.calls.append(key)
            if len(self.calls) <= self.deaf:
                raise self.error("the answer was lost")
            return f"receipt-{len(self.calls)}"

        return call


async def until_quiet(bench: Bench, rounds: int = 8) -> None:
    for _ in range(rounds):
        await bench.work()
        bench.clock.advance(2)


async def resolve(bench: Bench, receipt: Receipt[Any], name: str, *, happened: bool, value: Any = None) -> bool:
    return await bench.app.resolve(
        receipt.id, name, happened=happened, value=value, actor="ada", reason="the provider was asked"
    )


def test_a_call_is_made_once_and_its_outcome_is_kept(bench: Bench) -> None:
    """B20: a later failure of the handler does not repeat it."""
    provider, seen = Provider(), list[str]()

    @bench.app.task(retry=QUICK)
    async def pay(ctx: Context) -> str:
        seen.append(await ctx.once("charge", provider.charge("k")))
        if ctx.attempt < 3:
            raise ValueError("later, something else went wrong")
        return seen[-1]

    async def scenario() -> None:
        receipt = await pay.send()
        await until_quiet(bench)
        assert (await bench.record(receipt)).state is State.DONE
        assert provider.calls == ["k"]
        assert seen == ["receipt-1"] * 3
        kinds = [(step.name, step.kind) for step in await bench.app.journal(receipt.id)]
        assert kinds == [("charge!0", LineKind.INTENT), ("charge", LineKind.EFFECT)]
        (entry,) = await bench.app.ledger(receipt.id)
        assert (entry.name, entry.state, entry.tries) == ("charge", "done", 1)

    bench.run(scenario)


def test_the_outcome_has_the_type_of_the_calls_hint_from_the_first_time_on(sqlite_bench: Bench) -> None:
    bench = sqlite_bench
    seen: list[Any] = []

    async def typed() -> tuple[int, str]:
        return (1, "a")

    @bench.app.task(retry=QUICK)
    async def work(ctx: Context) -> None:
        seen.append(await ctx.once("typed", typed))
        seen.append(await ctx.once("plain", lambda: asyncio.sleep(0, (1, "a"))))  # type: ignore[arg-type]  # noqa: TID251
        if ctx.attempt == 1:
            raise ValueError

    async def scenario() -> None:
        await work.send()
        await until_quiet(bench)
        assert seen == [(1, "a"), [1, "a"]] * 2

    bench.run(scenario)


@pytest.mark.parametrize("error", [ConnectionError, TimeoutError, ValueError, KeyboardInterrupt])
def test_an_exception_leaves_the_effect_uncertain_and_a_person_decides(bench: Bench, error: type[Exception]) -> None:
    """B21: nothing is repeated silently."""
    provider = Provider(deaf=1, error=error)

    @bench.app.task(retry=QUICK)
    async def pay(ctx: Context) -> str:
        return await ctx.once("charge", provider.charge("k"))

    async def scenario() -> None:
        receipt = await pay.send()
        await until_quiet(bench)
        assert provider.calls == ["k"]
        record = await bench.record(receipt)
        assert record.state is State.PARKED
        *_, last = await bench.app.store.attempts(receipt.id)
        assert (last.failure.reason, last.failure.error_type) == ("uncertain", "onefold.errors.UncertainError")
        assert [entry.state for entry in await bench.app.ledger(receipt.id)] == ["uncertain"]
        bench.clock.advance(timedelta(days=30))
        assert await bench.work() == 0
        assert await resolve(bench, receipt, "charge", happened=True, value="found")
        assert not await resolve(bench, receipt, "charge", happened=False)
        await bench.work()
        assert await receipt.result() == "found"
        assert provider.calls == ["k"]

    bench.run(scenario)


def test_an_effect_that_did_not_happen_is_tried_again(bench: Bench) -> None:
    provider = Provider(deaf=1)

    @bench.app.task(retry=QUICK)
    async def pay(ctx: Context) -> str:
        return await ctx.once("charge", provider.charge("k"))

    async def scenario() -> None:
        receipt = await pay.send()
        await until_quiet(bench)
        assert await resolve(bench, receipt, "charge", happened=False)
        assert [entry.state for entry in await bench.app.ledger(receipt.id)] == ["not done"]
        await bench.work()
        assert await receipt.result() == "receipt-2"
        (entry,) = await bench.app.ledger(receipt.id)
        assert (entry.state, entry.tries) == ("done", 2)

    bench.run(scenario)


@pytest.mark.parametrize("instruction", [Retry("not yet"), Reject("never")])
def test_a_call_that_says_so_was_not_done(sqlite_bench: Bench, instruction: Exception) -> None:
    bench = sqlite_bench
    calls: list[int] = []

    async def call() -> str:
        calls.append(1)
        if len(calls) == 1:
            raise instruction
        return "done"

    @bench.app.task(retry=QUICK)
    async def pay(ctx: Context) -> str:
        return await ctx.once("charge", call)

    async def scenario() -> None:
        receipt = await pay.send()
        await until_quiet(bench)
        record = await bench.record(receipt)
        if isinstance(instruction, Reject):
            assert record.state is State.DEAD
            await bench.app.redrive([receipt.id], actor="ada", reason="try again")
            await until_quiet(bench)
        assert await receipt.result() == "done"
        assert len(calls) == 2

    bench.run(scenario)


def test_a_probe_decides_instead_of_a_person(bench: Bench) -> None:
    provider, answers = Provider(deaf=2), [NotHappened(), Happened("found")]

    async def ask() -> Happened[str] | NotHappened:
        return answers.pop(0)  # type: ignore[return-value]

    @bench.app.task(retry=QUICK)
    async def pay(ctx: Context) -> str:
        return await ctx.once("charge", provider.charge("k"), reconcile=ask)

    async def scenario() -> None:
        receipt = await pay.send()
        await until_quiet(bench)
        assert await receipt.result() == "found"
        assert provider.calls == ["k", "k"]
        assert answers == []

    bench.run(scenario)


def test_a_probe_that_cannot_tell_is_asked_again(sqlite_bench: Bench) -> None:
    bench = sqlite_bench
    provider, asked = Provider(deaf=1), list[int]()

    async def ask() -> Happened[str] | NotHappened:
        asked.append(1)
        if len(asked) < 3:
            raise ConnectionError("the provider is away")
        return Happened("found")

    @bench.app.task(retry=QUICK)
    async def pay(ctx: Context) -> str:
        return await ctx.once("charge", provider.charge("k"), reconcile=ask)

    async def scenario() -> None:
        receipt = await pay.send()
        await until_quiet(bench)
        assert await receipt.result() == "found"
        assert (len(provider.calls), len(asked)) == (1, 3)

    bench.run(scenario)


def test_a_probe_must_answer(sqlite_bench: Bench) -> None:
    bench = sqlite_bench
    provider = Provider(deaf=1)

    async def ask() -> Any:
        return True

    @bench.app.task(retry=RetryPolicy(base=1.0, fixed=True, max_attempts=2))
    async def pay(ctx: Context) -> str:
        return await ctx.once("charge", provider.charge("k"), reconcile=ask)

    async def scenario() -> None:
        receipt = await pay.send()
        await until_quiet(bench)
        record = await bench.record(receipt)
        assert record.failure is not None
        assert "Happened(value)" in record.failure.error_message
        assert provider.calls == ["k"]

    bench.run(scenario)


def test_a_keyed_call_is_repeated_only_while_the_provider_keeps_the_key(bench: Bench) -> None:
    """B21: a blind retry is refused once the provider may have forgotten its key."""
    provider = Provider(deaf=10)
    policy = RetryPolicy(base=3_600.0, fixed=True, max_attempts=50)

    @bench.app.task(key="{order}", retry=policy)
    async def pay(ctx: Context, order: int) -> str:
        key = ctx.upstream_key("stripe")
        return await ctx.once("charge", provider.charge(key), provider_keeps_keys_for=timedelta(hours=5))

    async def scenario() -> None:
        receipt = await pay.send(7)
        for _ in range(10):
            await bench.work()
            bench.clock.advance(3_600)
        assert len(provider.calls) == 5
        assert len(set(provider.calls)) == 1
        assert (await bench.record(receipt)).state is State.PARKED
        assert await resolve(bench, receipt, "charge", happened=False)
        await bench.work()
        assert len(provider.calls) == 6  # resolved as not happened: a new call and a new window

    bench.run(scenario)


class Answers:
    """A provider whose calls end as the test says, one after the other."""

    def __init__(self, *answers: str | BaseException) -> None:
        self.left = list(answers)
        self.calls = 0

    async def call(self) -> str:
        self.calls += 1
        answer = self.left.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer


def doubtful_then_void(bench: Bench, within: bool = False) -> None:
    """Try 0 may have had its effect, try 1 reports that it had none: the effect stays uncertain."""
    provider = Answers(TimeoutError("the answer was lost"), Retry(after=timedelta(hours=25 - 24 * within)), "again")

    @bench.app.task(retry=RetryPolicy(base=1.0, fixed=True, max_attempts=9))
    async def pay(ctx: Context) -> str:
        return await ctx.once("charge", provider.call, provider_keeps_keys_for=timedelta(hours=24))

    async def scenario() -> None:
        receipt = await pay.send()
        await until_quiet(bench)
        assert [entry.state for entry in await bench.app.ledger(receipt.id)] == ["uncertain"]
        bench.clock.advance(timedelta(hours=25 - 24 * within))
        await bench.work()
        if within:
            assert (await receipt.result(), provider.calls) == ("again", 3)
            return
        assert ((await bench.record(receipt)).state, provider.calls) == (State.PARKED, 2)
        assert [entry.state for entry in await bench.app.ledger(receipt.id)] == ["uncertain"]
        assert await resolve(bench, receipt, "charge", happened=False)
        assert [entry.state for entry in await bench.app.ledger(receipt.id)] == ["not done"]
        await bench.work()
        assert (await receipt.result(), provider.calls) == ("again", 3)

    bench.run(scenario)


def test_a_call_that_did_nothing_says_nothing_about_an_earlier_one(bench: Bench) -> None:
    """A provider that has forgotten the key of the uncertain try is not called again; an operator decides."""
    doubtful_then_void(bench)


def test_a_call_that_did_nothing_may_be_followed_by_another_within_the_providers_window(bench: Bench) -> None:
    """The window is that of the oldest uncertain try."""
    doubtful_then_void(bench, within=True)


def test_a_call_that_did_nothing_does_not_spare_the_probe(bench: Bench) -> None:
    """An earlier try stays uncertain until a probe answers; the answer holds for all tries."""
    provider = Answers(TimeoutError("lost"), Retry(after=1.0), TimeoutError("lost again"), "never called")
    asked = list[int]()

    async def ask() -> Happened[str] | NotHappened:
        asked.append(provider.calls)
        return Happened("found") if provider.calls == 3 else NotHappened()

    async def cannot_tell() -> Happened[str] | NotHappened:
        asked.append(provider.calls)
        raise ConnectionError("the provider is away")

    @bench.app.task(retry=RetryPolicy(base=1.0, fixed=True, max_attempts=9))
    async def pay(ctx: Context) -> str:
        # The second call is blind, while the provider knows the key; from then on there is a probe.
        if ctx.attempt == 2:
            return await ctx.once("charge", provider.call, provider_keeps_keys_for=3_600)
        return await ctx.once("charge", provider.call, reconcile=cannot_tell if ctx.attempt == 3 else ask)

    async def scenario() -> None:
        receipt = await pay.send()
        await until_quiet(bench)
        assert await receipt.result() == "found"
        assert (asked, provider.calls) == ([2, 2, 3], 3)
        lines = [(step.name, step.kind) for step in await bench.app.journal(receipt.id)]
        assert lines.count(("charge!0", LineKind.VOID)) == lines.count(("charge!1", LineKind.VOID)) == 1

    bench.run(scenario)


def test_a_call_inside_a_call_speaks_only_for_itself(sqlite_bench: Bench) -> None:
    """The inner call did nothing, but the outer one had sent its mail by then."""
    bench, mails = sqlite_bench, list[str]()

    @bench.app.task(retry=QUICK)
    async def work(ctx: Context) -> str:
        async def charge() -> str:
            raise Retry(after=1.0)

        async def mail() -> str:
            mails.append("sent")
            return await ctx.once("charge", charge)

        return await ctx.once("mail", mail)

    async def scenario() -> None:
        receipt = await work.send()
        await until_quiet(bench)
        assert mails == ["sent"]
        assert (await bench.record(receipt)).state is State.PARKED
        states = {entry.name: entry.state for entry in await bench.app.ledger(receipt.id)}
        assert states == {"mail": "uncertain", "charge": "not done"}

    bench.run(scenario)


def test_a_handler_that_swallows_the_uncertainty_is_parked_all_the_same(sqlite_bench: Bench) -> None:
    bench = sqlite_bench
    provider = Provider(deaf=1)

    @bench.app.task(retry=QUICK)
    async def pay(ctx: Context) -> str:
        try:
            return await ctx.once("charge", provider.charge("k"))
        except UncertainError:
            await bench.insert(ctx, "never")
            return "all is well"

    async def scenario() -> None:
        receipt = await pay.send()
        await until_quiet(bench)
        assert (await bench.record(receipt)).state is State.PARKED
        assert await bench.effects() == []

    bench.run(scenario)


def test_a_handler_may_ask_again_and_is_told_that_it_is_uncertain(sqlite_bench: Bench) -> None:
    bench = sqlite_bench
    provider, second = Provider(deaf=1), list[str]()

    async def ask() -> Happened[str] | NotHappened:
        return NotHappened()

    @bench.app.task
    async def pay(ctx: Context) -> str:
        try:
            return await ctx.once("charge", provider.charge("k"))
        except ConnectionError:
            second.append(await ctx.once("charge", provider.charge("k"), reconcile=ask))
            return second[0]

    async def scenario() -> None:
        receipt = await pay.send()
        await bench.work()
        assert await receipt.result() == "receipt-2"

    bench.run(scenario)


def test_once_does_not_commit_apart_from_an_open_transaction(bench: Bench) -> None:
    raised: list[BaseException] = []

    @bench.app.task
    async def pay(ctx: Context) -> None:
        await bench.insert(ctx, "row")
        try:
            await ctx.once("charge", Provider().charge("k"))
        except TransactionOpenError as error:
            raised.append(error)

    async def scenario() -> None:
        await pay.send()
        await bench.work()
        assert len(raised) == 1
        assert await bench.effects() == ["row"]

    bench.run(scenario)


def test_each_effect_has_a_name_of_its_own(sqlite_bench: Bench) -> None:
    bench = sqlite_bench
    raised: list[BaseException] = []

    @bench.app.task
    async def pay(ctx: Context) -> None:
        await ctx.once("charge", Provider().charge("k"))
        for name, error in (("charge", HandlerError), ("not a name", ConfigurationError)):
            try:
                await ctx.once(name, Provider().charge("k"))
            except error as one:
                raised.append(one)

    async def scenario() -> None:
        await pay.send()
        await bench.work()
        assert len(raised) == 2

    bench.run(scenario)


def test_a_handler_that_lost_its_lease_does_not_make_the_call(bench: Bench) -> None:
    provider = Provider()

    @bench.app.task
    async def pay(ctx: Context) -> str:
        if ctx.fence == 2:
            bench.clock.stall(60)
            (lease,) = await bench.app.store.claim(["default"], types=["pay"], limit=1, lease=30.0, worker="other")
            assert lease.fence == 3
        return await ctx.once("charge", provider.charge("k"))

    async def scenario() -> None:
        receipt = await pay.send()
        await bench.work()
        assert provider.calls == []
        bench.clock.advance(60)
        await bench.work()
        assert await receipt.result() == "receipt-1"

    bench.run(scenario)


def test_only_what_is_uncertain_can_be_resolved(sqlite_bench: Bench) -> None:
    bench = sqlite_bench

    @bench.app.task
    async def pay(ctx: Context) -> None:
        await ctx.once("charge", Provider().charge("k"))

    async def scenario() -> None:
        receipt = await pay.send()
        await bench.work()
        assert not await resolve(bench, receipt, "charge", happened=True)
        assert not await resolve(bench, receipt, "other", happened=True)
        with pytest.raises(DecodeError, match="JSON"):
            await resolve(bench, receipt, "charge", happened=True, value=object())

    bench.run(scenario)
