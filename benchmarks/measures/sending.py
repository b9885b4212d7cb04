"""S1 to S3: messages sent per second."""

from __future__ import annotations

from benchmarks.place import Figures, Place

SENDERS = 100


async def one_by_one(place: Place) -> Figures:
    return await _send(place, senders=1)


async def from_many(place: Place) -> Figures:
    return await _send(place, senders=SENDERS)


async def _send(place: Place, *, senders: int) -> Figures:
    async with place.sender() as (agent, _):
        return place.figure(await agent.ask("send", senders=senders, seconds=place.scale.send_seconds))


async def in_bulk(place: Place) -> Figures:
    async with place.sender() as (agent, _):
        return place.figure(await agent.ask("bulk", seconds=place.scale.send_seconds))
