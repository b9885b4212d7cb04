"""Rows that end a claim for all others, put back: the tests of ``tests/faults`` find them."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from tests.faults.row_scene import Shop, a_bad_row_ends_alone, a_number_at_the_limit_stops_nobody

from onefold.stores import rows
from onefold.stores.postgres import claiming, statements
from onefold.stores.sqlite import leasing


def test_adding_one_to_the_last_number_of_a_line_ends_every_claim(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison as it was: the largest number plus one is too large for the server."""
    ours = statements.OURS["lines_after"]
    before = ours.text.replace(b"place - 1 > coalesce(", b"place > 1 + coalesce(")
    assert before != ours.text
    monkeypatch.setitem(statements.OURS, "lines_after", replace(ours, text=before))  # type: ignore[index]
    with pytest.raises(AssertionError, match="the worker ended"):
        asyncio.run(a_number_at_the_limit_stops_nobody(postgres_url))


def test_a_claim_that_looks_for_no_bad_row_fails_for_all(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without looking for the row that is in the way, the worker ends with its error."""
    monkeypatch.setattr(claiming, "is_about_rows", lambda error: False)
    with pytest.raises(AssertionError, match="the worker ended"):
        asyncio.run(a_bad_row_ends_alone(postgres_url, Shop.overtax))


def test_headers_that_are_read_without_care_end_the_worker(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One message whose headers are no JSON fails the claim of all that are due with it."""
    monkeypatch.setattr(leasing, "read_envelope", lambda row: (rows.envelope_of(row), ""))
    with pytest.raises(AssertionError, match="the worker ended"):
        asyncio.run(a_bad_row_ends_alone(sqlite_url, Shop.garble))
