"""S10 and S12: whether a claim stays as fast, with millions of ended messages and beside a transaction left open."""

from __future__ import annotations

import statistics

import psycopg

from benchmarks.filling import keep_done_messages
from benchmarks.place import Figures, Place
from benchmarks.processes import Agent

#: The same claim on an empty store, and at the beginning, as separate series.
EMPTY = "empty store"
BEGINNING = "at the start"

_CLAIM = 100
_CLAIMS = 40
#: The first claims of a turn, which are slow because caches and plans are cold.
_COLD = 5
_TURNS = 5
_FIRST = 1

FOREIGN_PER_SECOND = 2_000
#: The pause between claims, so that each of them finds a full batch.
_EVERY_SECONDS = _CLAIM / FOREIGN_PER_SECOND
_COMPARED_SECONDS = 10.0


async def with_history(place: Place) -> Figures:
    """Take turns between a store that keeps very many ended messages and an empty one."""
    async with place.sender() as (kept, url), place.sender() as (empty, _):
        await kept.ask("fill", messages=1, first=_FIRST - 1)
        await kept.ask("special", name="claims", size=1, number=1)
        keep_done_messages(place.engine, url, place.scale.kept_messages)
        place.engine.calm(url)
        turns = [(await _claim(kept, turn), await _claim(empty, turn)) for turn in range(_TURNS)]
    return {place.row: {place.contender: [one for one, _ in turns], EMPTY: [other for _, other in turns]}}


async def _claim(agent: Agent, turn: int) -> float:
    """Fill the store, then claim all of it; return the milliseconds of a claim."""
    messages = _CLAIM * _CLAIMS
    await agent.ask("fill", messages=messages, first=_FIRST + turn * messages)
    return _milliseconds((await agent.ask("special", name="claims", size=_CLAIM, number=_CLAIMS))[_COLD:])


async def beside_foreign_transaction(place: Place) -> Figures:
    """Send and claim at a steady rate while another session leaves a transaction open."""
    seconds = place.scale.foreign_seconds
    number = round(seconds / _EVERY_SECONDS)
    compared = round(min(_COMPARED_SECONDS, seconds / 4) / _EVERY_SECONDS)
    async with place.sender() as (sender, url), place.sender_to(url) as claimer:
        await claimer.ask("special", name="claims", size=_CLAIM, number=1)
        with psycopg.connect(url) as foreign:
            foreign.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            foreign.execute("SELECT pg_current_xact_id()")
            sender.tell("pace", messages=number * _CLAIM, per_second=FOREIGN_PER_SECOND, batch=_CLAIM, first=0)
            taken = await claimer.ask(
                "special", name="claims", within=2 * seconds, size=_CLAIM, number=number, every=_EVERY_SECONDS
            )
            await sender.answer()
    first, last = taken[_COLD:][:compared], taken[-compared:]
    return {place.row: {place.contender: [_milliseconds(last)], BEGINNING: [_milliseconds(first)]}}


def _milliseconds(taken: list[tuple[float, int]]) -> float:
    """Return the median of the claims that found a full batch."""
    full = [seconds for seconds, messages in taken if messages == _CLAIM]
    if len(full) < len(taken) / 2:
        raise RuntimeError(f"only {len(full)} of {len(taken)} claims found {_CLAIM} messages")
    return statistics.median(full) * 1e3
