"""A duration that no clock can hold is refused where it is given, and fails only its own message."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from duration_scene import a_long_duration_fails_its_own_message, an_outcome_that_cannot_be_written_ends_alone
from row_scene import Shop

from onefold import App, ConfigurationError, Query, Rate, Retry, RetryPolicy, Snooze, State, limits
from onefold.clock import to_datetime
from onefold.errors import StoreUnavailableError
from onefold.store.open import open_store

#: No durations: longer than a century, beyond the calendar, not a number, negative, a truth value.
WRONG = (limits.DURATION_SECONDS_MAX * 1.001, 1e300, 10**400, timedelta.max, float("inf"), float("nan"), -1, True, "5s")
_NAMES = ("century", "calendar", "digits", "timedelta", "infinite", "nan", "negative", "bool", "text")


def test_a_long_duration_fails_its_own_message(store_url: str) -> None:
    """Snoozes, retries, sends, sleeps, signals and steps; the worker lives, and no other message runs twice."""
    asyncio.run(a_long_duration_fails_its_own_message(store_url, lambda kind: kind.endswith("ConfigurationError")))


def test_an_outcome_that_cannot_be_written_ends_alone(store_url: str) -> None:
    """A settlement that cannot be encoded makes its message a dead letter; the rest of the batch is settled."""
    asyncio.run(an_outcome_that_cannot_be_written_ends_alone(store_url))


_app = App("sqlite:///never-opened.db")


async def _task(number: int = 0) -> None: ...


_plain = _app.task(name="plain")(_task)


#: Every parameter that takes a duration, by the name in its error.
_PLACES: dict[str, Callable[[Any], object]] = {
    "after": lambda wrong: Snooze(after=wrong),
    "after ": lambda wrong: Retry(after=wrong),
    "delay": lambda wrong: _plain.options(delay=wrong),
    "expires": lambda wrong: _plain.options(expires=wrong),
    "deduplicate_for": lambda wrong: _plain.options(deduplicate="d", deduplicate_for=wrong),
    "timeout": lambda wrong: _app.task(name="t4", timeout=wrong)(_task),
    "expires ": lambda wrong: _app.task(name="t5", expires=wrong)(_task),
    "key_window": lambda wrong: _app.task(name="t6", key_window=wrong)(_task),
    "beat_within": lambda wrong: _app.task(name="t7", beat_within=wrong)(_task),
    "base": lambda wrong: RetryPolicy(base=wrong),
    "cap": lambda wrong: RetryPolicy(cap=wrong),
    "per of a rate": lambda wrong: Rate(1, per=wrong),
    "gap_after": lambda wrong: _app.task(name="t8", ordering_key="{number}", gap_after=wrong)(_task),
    "every": lambda wrong: _app.recurring(every=wrong, mode="rate", name="t9")(_task),
    "timeout ": lambda wrong: _app.step(timeout=wrong)(_task),
    "wait": lambda wrong: _app.debounce(_plain, key="{number}", wait=wrong, at_most=60),
    "at_most": lambda wrong: _app.debounce(_plain, key="{number}", wait=1, at_most=wrong),
    "window": lambda wrong: _app.recurring(every=60, mode="rate", catchup="all", window=wrong, name="t10")(_task),
}


@pytest.mark.parametrize("wrong", WRONG, ids=_NAMES)
@pytest.mark.parametrize("place", _PLACES)
def test_every_duration_is_checked_where_it_is_named(place: str, wrong: Any) -> None:
    """The error names the parameter, at the call; it does not appear later, when a store adds it to its clock."""
    with pytest.raises(ConfigurationError, match=rf"{place.strip()}\b"):
        _PLACES[place](wrong)


@pytest.mark.parametrize("wrong", [WRONG[0], 1e300, float("nan"), -1, True, "5s"], ids=str)
def test_a_lease_and_a_stop_are_checked_too(sqlite_url: str, wrong: Any) -> None:
    """Durations that a worker adds to its clock."""

    async def scenario() -> None:
        async with App(sqlite_url) as app:
            for option in ("lease", "stop_after"):
                with pytest.raises(ConfigurationError, match=option):
                    await app.work(until_idle=True, **{option: wrong})

    asyncio.run(scenario())


@pytest.mark.parametrize("moment", ["9999-12-31", "9000-06-01", "1969-01-01", "0001-01-01"])
def test_a_moment_outside_the_calendar_is_refused(moment: str) -> None:
    """Expiry is counted from this moment, so the sum must be a date too."""
    with pytest.raises(ConfigurationError, match=r"at is .*1970 to 8999"):
        _plain.options(at=datetime.fromisoformat(moment).replace(tzinfo=UTC))
    for wrong in ("tomorrow", 5, datetime.fromisoformat("2027-01-01")):
        with pytest.raises(ConfigurationError, match=r"at: .*tzinfo=UTC"):
            _plain.options(at=wrong)  # type: ignore[typeddict-item]


def test_the_longest_duration_is_accepted_and_shown(store_url: str) -> None:
    """The limits themselves work, alone and added up."""
    shop = Shop(store_url)

    async def scenario() -> None:
        await shop.app.migrate()
        longest = limits.DURATION_SECONDS_MAX
        async with shop.app:
            await shop.plain.options(at=datetime(8999, 12, 31, tzinfo=UTC), expires=longest).send(1)
            await shop.plain.options(delay=longest, expires=longest).send(2)
            await shop.plain.send(3)
            await shop.work_until(lambda: shop.have_run(3))
            for record in await shop.app.find(Query()):
                assert to_datetime(record.envelope.expires_at).year < 9999

    asyncio.run(scenario())


def test_an_instant_beyond_the_calendar_is_shown_as_its_last_day() -> None:
    """A damaged row must not prevent a listing."""
    assert to_datetime(2**63 - 1) == datetime.max.replace(tzinfo=UTC)
    assert to_datetime(-(2**63)) == datetime.min.replace(tzinfo=UTC)


def test_a_message_that_cannot_be_settled_now_does_not_keep_others(
    store_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After a few failures in a row each is tried alone; the stuck one is named in the log, and settled later."""
    shop = Shop(store_url)
    blocked: set[str] = set()
    kind = type(open_store(store_url))
    settle = kind.settle

    async def stubborn(store: Any, settlements: Any) -> Any:
        if any(lease.id in blocked for lease, _ in settlements):
            raise StoreUnavailableError("a row is locked")
        return await settle(store, settlements)

    monkeypatch.setattr(kind, "settle", stubborn)

    async def scenario() -> None:
        await shop.app.migrate()
        async with shop.app:
            stuck = await shop.plain.send(0)
            blocked.add(stuck.id)
            for number in range(1, 20):
                await shop.plain.send(number)

            async def all_done() -> bool:
                done = len(await shop.app.find(Query(states=(State.DONE,))))
                if done == 19:
                    blocked.clear()
                return done == 20

            await shop.work_until(all_done)
            assert len(shop.ran) == 20

    with caplog.at_level(logging.ERROR, "onefold"):
        asyncio.run(scenario())
    (named,) = [record.getMessage() for record in caplog.records if "settle_blocked" in record.getMessage()]
    assert "message_id=" in named


def test_a_store_that_is_away_is_not_taken_for_a_stuck_message(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While nothing can be settled, no message is named; afterwards all are settled together."""
    shop = Shop(sqlite_url)
    kind = type(open_store(sqlite_url))
    settle = kind.settle
    calls = 0

    async def away(store: Any, settlements: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls <= 7:
            raise StoreUnavailableError("away")
        return await settle(store, settlements)

    monkeypatch.setattr(kind, "settle", away)

    async def scenario() -> None:
        async with shop.app:
            for number in range(20):
                await shop.plain.send(number)

            async def all_done() -> bool:
                return len(await shop.app.find(Query(states=(State.DONE,)))) == 20

            await shop.work_until(all_done)

    with caplog.at_level(logging.ERROR, "onefold"):
        asyncio.run(scenario())
    assert not caplog.records
    assert len(shop.ran) == 20
