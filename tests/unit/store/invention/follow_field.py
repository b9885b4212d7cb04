"""Follow an invented field of the envelope along every way that a message can take."""

from __future__ import annotations

from typing import Any

from onefold import App, Context, Query
from onefold.message.envelope import Envelope, from_json, pack_headers
from onefold.store import KEEP, Lease, PutOptions
from onefold.testing import FakeClock, MemoryTransport, drain


async def follow(url: str) -> list[str]:
    """Send messages with the field by every way there is, and return the ways on which it was lost."""

    lost: list[str] = []

    def look(way: str, found: Any, wanted: Any) -> None:
        if found != wanted:
            lost.append(f"{way}: {found!r} instead of {wanted!r}")

    clock, broker = FakeClock(), MemoryTransport()
    app = App(url, clock=clock)
    seen: list[Envelope] = []

    @app.task(queue="work")
    async def work(ctx: Context, number: int) -> None:
        seen.append(ctx.message)

    @app.on("thing.happened")
    async def heard(ctx: Context, number: int) -> None:
        seen.append(ctx.message)

    topic = app.topic("thing.happened", int)
    app.relay(topic, to=broker, stream="out")
    app.receive(broker, "in")

    def message(number: int, **changes: Any) -> Envelope:
        made = work.call(number).envelope(app._ids.make())
        return Envelope(**{**{name: getattr(made, name) for name in Envelope.__struct_fields__}, **changes})

    await app.migrate()
    async with app:
        store = app.store

        async def through(way: str, envelopes: list[Envelope], options: PutOptions = KEEP) -> None:
            await store.put(envelopes, options)
            wanted = {e.id: getattr(e, "invented") for e in envelopes}  # noqa: B009
            records = await store.find(Query(ids=tuple(wanted), limit=len(wanted)))
            look(f"{way}, find", {one.envelope.id: one.envelope.invented for one in records}, wanted)  # type: ignore[attr-defined]
            leases: list[Lease] = []
            while more := await store.claim(["work"], types=["work"], limit=100, lease=30.0, worker="w"):
                leases += more
            look(f"{way}, claim", {one.id: one.envelope.invented for one in leases}, wanted)  # type: ignore[attr-defined]

        await through("put of one", [message(1, invented="a")])
        await through("put of one, keyed", [message(2, invented="b", idempotency_key="two")])
        # A bulk put may write out once what messages have in common: here all but the last are the same.
        values = ["x"] * 20 + ["y"]
        await through("put of many", [message(n, invented=value) for n, value in enumerate(values)])
        keyed = [message(n, invented=value, idempotency_key=f"many-{n}") for n, value in enumerate(values)]
        await through("put of many, keyed", keyed)
        none_or_one = [message(n, invented=value, idempotency_key=f"some-{n}") for n, value in enumerate(["", "z"])]
        await through("put of some without", none_or_one)
        batch = [message(n, invented=value, idempotency_key=f"batch-{n}") for n, value in enumerate(values)]
        await through("batch put", batch, PutOptions(batch_key="batch"))
        look("headers", pack_headers(message(1, invented="h")) is None, False)

        event = Envelope(
            id=app._ids.make(),
            message_type="thing.happened",
            queue=topic.queue,
            idempotency_key="event",
            correlation_id="c",
            causation_id="c",
            subject="s",
            payload_inline=b"7",
            invented="event",  # type: ignore[call-arg]
        )
        await store.put([event])
        await drain(app, advance=False)
        look("copy for a subscriber", [one.invented for one in seen], ["event"])  # type: ignore[attr-defined]

        published = [from_json(entry.body) for entry in broker._streams["out"]]
        look("relay", [one.invented for one in published], ["event"])  # type: ignore[attr-defined]
        seen.clear()
        await broker.publish([message(9, id="theirs", queue="in", idempotency_key="in-9", invented="received")])
        await drain(app, advance=False)
        look("receive", [one.invented for one in seen], ["received"])  # type: ignore[attr-defined]
    return lost
