"""Journals of runs that were claimed together are read together, and never for another claim than the one asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from onefold import limits
from onefold.clock import give_way
from onefold.envelope import Envelope
from onefold.errors import StoreUnavailableError
from onefold.reading import ReadAhead
from onefold.step import Step, StepKind
from onefold.store import Lease, Store


class Shelf:
    """A store that counts what is asked of it at once."""

    def __init__(self, size: int = 10, error: Exception | None = None) -> None:
        self.asked: list[list[str]] = []
        self._size = size
        self._error = error
        self._now: list[str] = []

    async def steps(self, message_id: str) -> list[Step]:
        if not self._now:
            asyncio.get_running_loop().call_soon(self._turn)
        self._now.append(message_id)
        await give_way()
        if self._error is not None:
            raise self._error
        return [Step("a#1", StepKind.RESULT, b"x" * self._size, at=len(self.asked))]

    def _turn(self) -> None:
        self.asked.append(self._now)
        self._now = []


def lease(number: int, fence: int = 4, *, pinned: bool = True) -> Lease:
    fields: dict[str, Any] = {"message_type": "flow", "queue": "default", "subject": "-", "payload_inline": b"{}"}
    keys = {"idempotency_key": "k", "correlation_id": "c", "causation_id": "c"}
    return Lease(Envelope(id=f"run-{number:03}", pinned=pinned, **fields, **keys), fence, 1, 0, 0, 0, "w")


def read(shelf: Shelf, scenario: Callable[[ReadAhead], Awaitable[None]]) -> None:
    asyncio.run(cast(Any, scenario(ReadAhead(cast(Store, shelf)))))


def test_those_that_come_next_are_read_with_the_one_that_is_asked_for() -> None:
    shelf = Shelf()
    claimed = [lease(number) for number in range(limits.READ_AHEAD + 10)]

    async def scenario(ahead: ReadAhead) -> None:
        ahead.expect([*claimed, lease(900, fence=2), lease(901, pinned=False)])
        for one in claimed:
            assert len(await ahead.read(one)) == 1
        assert await ahead.read(lease(900, fence=2)) == []

    read(shelf, scenario)
    assert [len(turn) for turn in shelf.asked] == [limits.READ_AHEAD, 10]


def test_large_journals_are_read_one_by_one() -> None:
    """What is read ahead lies in memory."""
    shelf = Shelf(size=limits.READ_AHEAD_BYTES + 1)
    claimed = [lease(number) for number in range(limits.READ_AHEAD + 3)]

    async def scenario(ahead: ReadAhead) -> None:
        ahead.expect(claimed)
        for one in claimed:
            await ahead.read(one)

    read(shelf, scenario)
    assert [len(turn) for turn in shelf.asked] == [limits.READ_AHEAD, 1, 1, 1]


def test_what_was_read_for_an_older_claim_is_not_given_to_a_newer_one() -> None:
    shelf = Shelf()
    first, second = lease(1), lease(2)
    again = lease(2, fence=7)

    async def scenario(ahead: ReadAhead) -> None:
        ahead.expect([first, second])
        await ahead.read(first)
        ahead.expect([again])
        await ahead.read(again)
        ahead.forget(again)

    read(shelf, scenario)
    assert shelf.asked == [["run-001", "run-002"], ["run-002"]]


def test_what_was_handed_back_is_forgotten() -> None:
    shelf = Shelf()
    first, second, third = lease(1), lease(2), lease(3)

    async def scenario(ahead: ReadAhead) -> None:
        ahead.expect([first, second, third])
        ahead.forget(second)
        await ahead.read(first)
        ahead.forget(third)
        assert ahead._begun == {}

    read(shelf, scenario)
    assert shelf.asked == [["run-001", "run-003"]]


def test_each_is_told_that_the_store_is_away() -> None:
    shelf = Shelf(error=StoreUnavailableError("away"))
    first, second = lease(1), lease(2)

    async def scenario(ahead: ReadAhead) -> None:
        ahead.expect([first, second])
        for one in (first, second):
            with pytest.raises(StoreUnavailableError):
                await ahead.read(one)

    read(shelf, scenario)
