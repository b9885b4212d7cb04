"""A redriven run retries its failures, and only those: failures that its code has handled stay as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from onefold import Receipt, RetryPolicy, Run, State
from onefold.store.journal_lines import LineKind
from onefold.testing import drain

if TYPE_CHECKING:
    from tests.unit.conftest import Bench

ONE = RetryPolicy(max_attempts=1)


class Shop:
    """Steps and a task that fail as long as they are broken, and the calls they got."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.broken = {"pay", "pack", "post"}
        self.calls: list[str] = []

        @bench.app.task(retry=ONE)
        async def post() -> str:
            return self._do("post")

        self.post = post

    def _do(self, name: str) -> str:
        self.calls.append(name)
        if name in self.broken:
            raise ConnectionError(f"{name} is down")
        return name

    async def pay(self) -> str:
        return self._do("pay")

    async def pack(self) -> str:
        return self._do("pack")

    async def note(self) -> str:
        return self._do("note")

    async def redrive(self, receipt: Receipt[Any], *mended: str) -> None:
        """Repair functions, redrive the dead letters, and work until nothing is due."""
        self.broken -= set(mended)
        dead = [one.envelope.id for one in await self.bench.messages() if one.state is State.DEAD]
        ids = [id_ for id_ in dead if id_ != receipt.id]
        for letters in (ids if "post" in mended else [], [receipt.id]):
            await self.bench.app.redrive(letters, actor="ada", reason="mended")
            await drain(self.bench.app)


def test_a_step_that_failed_beside_a_branch_that_succeeded_is_tried_again(bench: Bench) -> None:
    """Its failure was recorded together with the result of the other branch."""
    shop = Shop(bench)

    async def later(run: Run) -> str:
        await run.sleep(1)
        return await run.step(shop.note)

    @bench.app.workflow(retry=ONE)
    async def flow(run: Run) -> list[str]:
        strict = run.options(retry=ONE)
        return list(await run.gather(strict.step(shop.pay), later(run), strict.step(shop.pack)))

    async def scenario() -> None:
        receipt = await flow.send()
        await drain(bench.app)
        assert (await bench.record(receipt)).state is State.DEAD
        failed = [line.name for line in await bench.app.journal(receipt.id) if line.kind is LineKind.FAILED]
        assert failed == ["pay#1", "pack#1"]
        await shop.redrive(receipt, "pay")
        assert (await bench.record(receipt)).state is State.DEAD
        await shop.redrive(receipt, "pack")
        assert await receipt.result() == ["pay", "note", "pack"]
        assert shop.calls == ["pay", "pack", "note", "pay", "pack", "pack"]

    bench.run(scenario)


def test_a_child_that_failed_beside_a_branch_that_succeeded_is_asked_again(bench: Bench) -> None:
    """The child runs again, and the branch that succeeded keeps its result."""
    shop = Shop(bench)

    async def later(run: Run) -> str:
        await run.sleep(1)
        return await run.step(shop.note)

    @bench.app.workflow(retry=ONE)
    async def flow(run: Run) -> list[str]:
        both = await run.gather(run.child(shop.post), later(run))
        await run.sleep(1)
        return list(both)

    async def scenario() -> None:
        receipt = await flow.send()
        await drain(bench.app)
        assert (await bench.record(receipt)).state is State.DEAD
        await shop.redrive(receipt, "post")
        assert await receipt.result() == ["post", "note"]
        assert shop.calls == ["post", "note", "post"]

    bench.run(scenario)


def test_a_signal_that_did_not_come_in_time_beside_another_branch_is_taken_after_a_redrive(bench: Bench) -> None:
    """Waits behave like steps, because their end is recorded too."""
    shop = Shop(bench)

    async def later(run: Run) -> str:
        await run.sleep(2)
        return await run.step(shop.note)

    @bench.app.workflow(retry=ONE)
    async def flow(run: Run) -> list[str]:
        both = await run.gather(run.signal("go", timeout=1, type=str), later(run))
        await run.sleep(1)
        return list(both)

    async def scenario() -> None:
        receipt = await flow.send()
        await drain(bench.app)
        assert (await bench.record(receipt)).state is State.DEAD
        await bench.app.signal(receipt.id, "go", "on")
        await shop.redrive(receipt)
        assert await receipt.result() == ["on", "note"]
        assert shop.calls == ["note"]

    bench.run(scenario)


def test_what_the_code_did_because_of_a_failure_stays(bench: Bench) -> None:
    """The payment failed, so the other bank was asked; a redrive must not pay at both."""
    shop = Shop(bench)

    async def bank(run: Run) -> str:
        try:
            return await run.options(retry=ONE).step(shop.pay)
        except Exception:
            return await run.step(shop.note)

    @bench.app.workflow(retry=ONE)
    async def flow(run: Run) -> list[str]:
        both = await run.gather(bank(run), run.step(shop.note))
        return [both[0], await run.options(retry=ONE).step(shop.pack)]

    async def scenario() -> None:
        receipt = await flow.send()
        await drain(bench.app)
        assert (await bench.record(receipt)).state is State.DEAD
        await shop.redrive(receipt, "pay", "pack")
        assert await receipt.result() == ["note", "pack"]
        assert shop.calls.count("pay") == 1

    bench.run(scenario)


def test_a_failure_after_which_the_code_did_something_and_died_is_not_tried_again(bench: Bench) -> None:
    """Retrying it would leave the later calls without their reason."""
    shop = Shop(bench)

    @bench.app.workflow(retry=ONE)
    async def flow(run: Run) -> str:
        try:
            return await run.options(retry=ONE).step(shop.pay)
        except Exception:
            await run.step(shop.note)
            raise

    async def scenario() -> None:
        receipt = await flow.send()
        await drain(bench.app)
        await shop.redrive(receipt, "pay")
        assert (await bench.record(receipt)).state is State.DEAD
        assert shop.calls == ["pay", "note"]

    bench.run(scenario)


@pytest.mark.parametrize("wraps", [True, False], ids=["with its cause", "without"])
def test_a_failure_that_the_code_only_renames_is_tried_again(sqlite_bench: Bench, wraps: bool) -> None:
    """Including a run that died of its own exception, and failures that were kept among results."""
    bench = sqlite_bench
    shop = Shop(bench)

    @bench.app.workflow(retry=ONE)
    async def flow(run: Run) -> list[str]:
        strict = run.options(retry=ONE)
        both = await run.gather(strict.step(shop.pay), run.sleep(1), return_exceptions=True)
        if isinstance(both[0], Exception):
            raise RuntimeError("it could not be paid") from (both[0] if wraps else None)
        return [both[0]]

    async def scenario() -> None:
        receipt = await flow.send()
        await drain(bench.app)
        assert (await bench.record(receipt)).state is State.DEAD
        await shop.redrive(receipt)
        assert (await bench.record(receipt)).state is State.DEAD
        assert shop.calls == ["pay", "pay"]
        await shop.redrive(receipt, "pay")
        assert await receipt.result() == ["pay"]

    bench.run(scenario)


def test_the_history_shows_a_failure_that_was_retried_as_a_try(sqlite_bench: Bench) -> None:
    bench = sqlite_bench
    shop = Shop(bench)

    @bench.app.workflow(retry=ONE)
    async def flow(run: Run) -> None:
        strict = run.options(retry=ONE)
        await run.gather(strict.step(shop.pay), run.signal("go", timeout=1), run.sleep(2), run.child(shop.post))
        await run.signal("end")

    async def scenario() -> None:
        receipt = await flow.send()
        await drain(bench.app)
        await bench.app.signal(receipt.id, "go", 1)
        await shop.redrive(receipt, "pay", "post")
        chronicle = await bench.app.chronicle(receipt.id)
        assert chronicle is not None
        states = {entry.name: (entry.state, len(entry.tries)) for entry in chronicle.entries}
        assert states == {
            "pay#1": ("done", 1),
            "go#1": ("done", 0),
            "sleep#1": ("done", 0),
            "post#1": ("done", 0),
            "end#1": ("waiting", 0),
        }

    bench.run(scenario)
