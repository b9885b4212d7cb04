"""Defects by which one bad row fails a claim for all, put back: the tests of ``tests/faults`` find them."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from tests.faults.row_scene import Shop, a_bad_row_ends_alone, a_number_at_the_limit_stops_no_worker

from onefold.store.postgres.verbs import claimer
from onefold.store.postgres.wire import statements
from onefold.store.shared import rows
from onefold.store.sqlite.verbs import claim as leasing


def test_adding_one_to_the_last_number_of_a_line_ends_every_claim(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison adds one to the largest number, which overflows on the server."""
    ours = statements.OURS["lines_after"]
    before = ours.text.replace(b"place - 1 > coalesce(", b"place > 1 + coalesce(")
    assert before != ours.text
    monkeypatch.setitem(statements.OURS, "lines_after", replace(ours, text=before))  # type: ignore[index]
    with pytest.raises(AssertionError, match="the worker ended"):
        asyncio.run(a_number_at_the_limit_stops_no_worker(postgres_url))


def test_a_claim_that_looks_for_no_bad_row_fails_for_all(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without looking for the bad row, the worker ends with its error."""
    monkeypatch.setattr(claimer, "is_about_rows", lambda error: False)
    with pytest.raises(AssertionError, match="the worker ended"):
        asyncio.run(a_bad_row_ends_alone(postgres_url, Shop.overtax))


def test_headers_that_are_read_without_care_end_the_worker(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message whose headers are not JSON fails the claim of all messages due with it, however often it is tried."""
    monkeypatch.setattr(leasing, "read_envelope", lambda row: (rows.envelope_of(row), ""))
    with pytest.raises((AssertionError, TimeoutError)):
        asyncio.run(a_bad_row_ends_alone(sqlite_url, Shop.garble))
