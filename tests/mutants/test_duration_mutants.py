"""Defects by which a long duration ends a worker, put back: the tests of ``tests/faults`` find them."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
from tests.faults import row_scene
from tests.faults.duration_scene import (
    a_long_duration_fails_its_own_message,
    an_outcome_that_cannot_be_written_ends_alone,
)

from onefold import errors
from onefold.worker.settler import Settler


async def _end_the_worker(settler: Settler, settlements: Any, error: Exception) -> None:
    """Settle as a settler does that expects no error but an unreachable store."""
    raise error


def test_durations_without_a_limit_fail_as_something_else(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some handlers sleep beyond the calendar, others fail when they are settled, without the name of the duration."""
    monkeypatch.setattr(errors, "DURATION_SECONDS_MAX", math.inf)
    monkeypatch.setattr(row_scene, "DONE_SECONDS_MAX", 2.0)
    with pytest.raises((AssertionError, TimeoutError)):
        asyncio.run(a_long_duration_fails_its_own_message(store_url, lambda kind: kind.endswith("ConfigurationError")))


def test_durations_without_a_limit_end_a_worker_that_settles_all_or_nothing(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One message ends its worker, and every worker that takes it over."""
    monkeypatch.setattr(errors, "DURATION_SECONDS_MAX", math.inf)
    monkeypatch.setattr(Settler, "_settle_apart", _end_the_worker)
    with pytest.raises(AssertionError, match="the worker ended"):
        asyncio.run(a_long_duration_fails_its_own_message(store_url, lambda kind: kind.endswith("ConfigurationError")))


def test_a_settler_that_settles_all_or_nothing_ends_the_worker(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One outcome that cannot be encoded fails the others of its batch."""
    monkeypatch.setattr(Settler, "_settle_apart", _end_the_worker)
    with pytest.raises(AssertionError, match="the worker ended"):
        asyncio.run(an_outcome_that_cannot_be_written_ends_alone(store_url))
