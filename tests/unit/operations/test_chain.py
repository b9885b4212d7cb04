"""The chain of a message: its causes and its consequences.  M6, A5, A6."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from onefold import Context, Envelope, Query, Record, Reject, Run, State, limits
from onefold.operations.chain import make_links

if TYPE_CHECKING:
    from tests.unit.conftest import Bench


def test_a_chain_is_read_from_any_of_its_messages(bench: Bench) -> None:
    """M6: events, copies, failures, duplicates, steps and effects, each below its cause."""
    app = bench.app
    placed = app.topic("order.placed", int, key="{event}")
    refused = app.topic("stock.refused", int)

    @app.on(placed)
    async def reserve(ctx: Context, order: int) -> None:
        ctx.publish(refused, order)

    @app.on(placed)
    async def mail(order: int) -> None:
        raise Reject("no address")

    async def pay() -> str:
        raise ConnectionError

    @app.on(refused)
    async def cancel(ctx: Context, order: int) -> None:
        ctx.send(refund, order)
        await ctx.once("bank", pay)

    @app.workflow
    async def refund(run: Run, order: int) -> None:
        await run.step(note, order)

    @app.task
    async def done() -> None: ...

    async def note(ctx: Context, order: int) -> None:
        ctx.send(done)

    async def scenario() -> None:
        other = await placed.publish(8)
        event = await placed.publish(7)
        await placed.publish(7)
        await refund.options(correlation_id=event.id, causation_id=event.id).send(7)
        while await bench.work():
            bench.clock.advance(limits.RETRY_CAP)
        found = await app.chain(event.id)
        assert found is not None
        assert found.whole
        tree = [(link.depth, link.record.envelope.message_type, link.record.state.name) for link in found.links]
        assert tree[0] == (0, "order.placed", "DONE")
        assert sorted(tree[1:]) == [
            (1, "mail", "DEAD"),
            (1, "refund", "DONE"),
            (1, "reserve", "DONE"),
            (2, "done", "DONE"),
            (2, "stock.refused", "DONE"),
            (3, "cancel", "PARKED"),
        ]
        links = {link.record.envelope.message_type: link for link in found.links}
        assert links["order.placed"].record.suppressed == 1
        assert (links["done"].step, links["done"].parent) == ("note#1", links["refund"].id)
        assert [(one.name, one.state) for one in links["cancel"].effects] == [("bank", "uncertain")]
        assert links["mail"].as_dict()["reason"] == "rejected"
        assert [one["effects"] for one in found.as_dict()["links"] if one["message_type"] == "cancel"] != [[]]
        assert await app.chain(links["cancel"].id) == found
        theirs = await app.chain(other.id)
        assert theirs is not None
        assert event.id not in [link.id for link in theirs.links]
        assert await app.chain("00000000-0000-7000-8000-000000000000") is None

    bench.run(scenario)


def test_messages_are_found_by_a_correlation_id_of_any_kind(bench: Bench) -> None:
    """A5: by the first message's own id, by a foreign one, and by one that is also the id of an unrelated message."""

    @bench.app.task
    async def work() -> None: ...

    async def scenario() -> None:
        first = await work.send()
        await work.send()
        stranger = await work.options(correlation_id="request 7").send()
        for correlation in (first.id, "request 7", stranger.id):
            bench.clock.advance(1)  # so that ids rise in the order of creation
            await work.options(correlation_id=correlation).send()
        await bench.work()
        for correlation, number in ((first.id, 2), ("request 7", 2), (stranger.id, 1), ("unknown", 0)):
            found = await bench.app.find(Query(correlation_id=correlation))
            assert len(found) == number, correlation
            assert {one.envelope.correlation_id for one in found} <= {correlation}
            assert await bench.app.find(Query(correlation_id=correlation, states=(State.DEAD,))) == []
        (last,) = await bench.app.find(Query(correlation_id="request 7", after=stranger.id))
        assert last.envelope.id > stranger.id
        (only,) = await bench.app.find(Query(correlation_id="request 7", limit=1))
        assert only.envelope.id == stranger.id

    bench.run(scenario)


def test_a_chain_that_has_no_end_is_shown_from_its_beginning(
    sqlite_bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two events that cause each other for ever, as in a program that has gone wrong."""
    monkeypatch.setattr(limits, "CHAIN_MAX", 50)
    app = sqlite_bench.app
    ping = app.topic("ping", int)

    @app.on(ping)
    async def pong(ctx: Context, number: int) -> None:
        sqlite_bench.clock.advance(0.01)
        if number < 60:
            ctx.publish(ping, number + 1)

    async def scenario() -> None:
        first = await ping.publish(0)
        await sqlite_bench.work()
        found = await app.chain(first.id)
        assert found is not None
        assert not found.whole
        assert [link.depth for link in found.links] == list(range(50))

    sqlite_bench.run(scenario)


def record(id_: str, causation_id: str) -> Record:
    envelope = Envelope(
        id=id_,
        message_type="t",
        queue="q",
        idempotency_key=id_,
        correlation_id="c",
        causation_id=causation_id,
        subject="s",
    )
    return Record(envelope, State.DONE, 1, 0, 0, 0)


def test_causes_that_go_round_in_circles_hide_nothing() -> None:
    """A6: a causation id may come from anywhere."""
    made = [record("a", "b"), record("b", "a"), record("c", "c"), record("d", "elsewhere"), record("e", "d")]
    links = make_links(made)
    assert {link.id: (link.parent, link.depth) for link in links} == {
        "a": (None, 0),
        "b": ("a", 1),
        "c": (None, 0),
        "d": (None, 0),
        "e": ("d", 1),
    }


def test_a_chain_deeper_than_any_stack_is_no_problem() -> None:
    made = [record(f"{n:05}", f"{n - 1:05}") for n in range(20_000)]
    links = make_links(made)
    assert links[-1].depth == 19_999
