"""Renewing: one lease whose row is locked, or one call that fails, costs no other lease."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import cast

import pytest

from onefold.clock import MICROSECONDS, give_way
from onefold.errors import StoreUnavailableError
from onefold.handlers.lease import Held
from onefold.store import Lease, Store
from onefold.testing import FakeClock
from onefold.worker.renewer import Renewer

LEASE_SECONDS = 30.0


class _Named:
    def __init__(self, id_: str) -> None:
        self.id = id_


class _Store:
    """Renews unless ``trouble`` says otherwise of the ids in a call; remembers the calls."""

    def __init__(self, trouble: Callable[[list[str]], str]) -> None:
        self._trouble = trouble
        self.calls: list[list[str]] = []
        self.waiting = 0

    async def extend(self, leases: Sequence[Lease], *, lease: float) -> list[bool]:
        ids = [one.id for one in leases]
        self.calls.append(ids)
        trouble = self._trouble(ids)
        if trouble == "refuse":
            raise StoreUnavailableError("the row is locked")
        if trouble == "hang":
            self.waiting += 1
            try:
                await asyncio.Event().wait()
            finally:
                self.waiting -= 1
        return [id_ != "taken over" for id_ in ids]


class _Scene:
    """A renewer and the leases in its care, on a clock that the test moves."""

    def __init__(self, store: _Store, ids: Sequence[str]) -> None:
        self.clock = FakeClock()
        until = self.clock.steady() + round(LEASE_SECONDS * MICROSECONDS)
        self.held = {id_: Held(cast(Lease, _Named(id_)), until) for id_ in ids}
        self.renewed: list[int] = []
        self.forget = True
        self.renewer = Renewer(cast(Store, store), self.clock, self.held, LEASE_SECONDS, self.renewed.append)

    async def pass_seconds(self, seconds: int) -> None:
        """Let time pass second by second, and every task that is due run."""
        for _ in range(seconds):
            self.clock.advance(1.0)
            for _ in range(50):
                await give_way()
            if self.forget:
                for id_ in [id_ for id_, one in self.held.items() if one.lost]:
                    del self.held[id_]  # as its runner lets go of it

    def left(self, id_: str) -> float:
        return (self.held[id_].until - self.clock.steady()) / MICROSECONDS


def _scene(store: _Store, ids: Sequence[str], story: Callable[[_Scene], object]) -> None:
    async def main() -> None:
        scene = _Scene(store, ids)
        renewing = asyncio.create_task(scene.renewer.run())
        await cast("asyncio.Future[None]", story(scene))
        assert not renewing.done()
        renewing.cancel()
        await asyncio.wait([renewing])
        assert (asyncio.all_tasks() - {cast("asyncio.Task[None]", asyncio.current_task())}, store.waiting) == (set(), 0)

    asyncio.run(main())


@pytest.mark.parametrize("trouble", ["hang", "refuse"])
def test_a_lease_whose_row_is_locked_is_lost_alone(trouble: str, caplog: pytest.LogCaptureFixture) -> None:
    """Every call with its row in it gets no answer, or an error; the others are renewed in time all along."""
    ids = [f"free {number}" for number in range(40)]
    store = _Store(lambda asked: trouble if "locked" in asked and store_is_locked else "")
    store_is_locked = False

    async def story(scene: _Scene) -> None:
        nonlocal store_is_locked
        await scene.pass_seconds(1)
        store_is_locked = True
        for _ in range(120):
            await scene.pass_seconds(1)
            assert all(scene.left(id_) > 0 for id_ in ids)
        assert set(scene.held) == set(ids)
        # The others are renewed together again.
        assert len(store.calls[-1]) == len(ids)
        assert scene.renewed[-1] >= scene.clock.steady() - LEASE_SECONDS / 3 * MICROSECONDS
        assert not [one for one in scene.held.values() if one.lost]

    with caplog.at_level(logging.WARNING, "onefold"):
        _scene(store, [*ids, "locked"], story)
    assert len(caplog.messages) < 10


def test_a_lease_that_is_over_is_not_renewed_while_its_message_is_handed_back() -> None:
    """Handing back waits for the locked row too, and the others are renewed together meanwhile."""
    store = _Store(lambda asked: "hang" if "locked" in asked else "")

    async def story(scene: _Scene) -> None:
        scene.forget = False
        await scene.pass_seconds(31)
        assert scene.held["locked"].lost
        store.calls.clear()
        await scene.pass_seconds(30)
        assert store.calls == [["free", "also free"]] * 3

    _scene(store, ["free", "also free", "locked"], story)


def test_a_row_that_is_locked_for_a_while_is_renewed_when_it_is_free() -> None:
    store_is_locked = True
    store = _Store(lambda asked: "hang" if "locked" in asked and store_is_locked else "")

    async def story(scene: _Scene) -> None:
        nonlocal store_is_locked
        await scene.pass_seconds(15)
        store_is_locked = False
        await scene.pass_seconds(60)
        assert set(scene.held) == {"free", "locked"}
        assert sorted(store.calls[-1]) == ["free", "locked"]
        assert scene.left("locked") >= LEASE_SECONDS * 2 / 3 - 1

    _scene(store, ["free", "locked"], story)


def test_more_locked_rows_than_are_asked_about_at_once_cost_no_other_lease() -> None:
    locked = [f"locked {number}" for number in range(20)]
    ids = [f"free {number}" for number in range(20)]
    began = False
    store = _Store(lambda asked: "refuse" if began and not set(locked).isdisjoint(asked) else "")

    async def story(scene: _Scene) -> None:
        nonlocal began
        await scene.pass_seconds(1)
        began = True
        await scene.pass_seconds(60)
        assert set(scene.held) == set(ids)

    _scene(store, [*locked, *ids], story)


def test_a_slow_part_of_many_leases_does_not_hold_up_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """More leases than one statement renews are asked about at the same time."""
    monkeypatch.setattr("onefold.worker.renewer._TOGETHER_MAX", 2)
    store = _Store(lambda asked: "hang" if "a" in asked else "")

    async def story(scene: _Scene) -> None:
        await scene.pass_seconds(1)
        assert store.calls == [["a", "b"], ["c", "d"]]
        assert (scene.left("a"), scene.left("c")) == (29, 30)
        await scene.pass_seconds(14)
        assert {id_: scene.left(id_) > 20 for id_ in scene.held} == {"a": False, "b": True, "c": True, "d": True}

    _scene(store, ["a", "b", "c", "d"], story)


def test_a_store_that_is_away_loses_leases_when_they_are_over_and_not_before() -> None:
    """No call is made for lost leases, and few at a time for the others."""
    ids = [str(number) for number in range(100)]
    store = _Store(lambda asked: "hang")

    async def story(scene: _Scene) -> None:
        for _ in range(29):
            await scene.pass_seconds(1)
            assert len(scene.held) == 100
            assert store.waiting <= 17
        await scene.pass_seconds(1)
        assert not scene.held
        await scene.pass_seconds(30)
        assert store.waiting == 0

    _scene(store, ids, story)


def test_a_lease_that_was_taken_over_is_lost_at_once() -> None:
    store = _Store(lambda asked: "")

    async def story(scene: _Scene) -> None:
        taken = scene.held["taken over"]
        await scene.pass_seconds(1)
        assert (taken.lost, taken.taken_over, list(scene.held)) == (True, True, ["mine"])

    _scene(store, ["mine", "taken over"], story)
