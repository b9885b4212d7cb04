"""Defects of the SQLite store, put back: the scenarios of its tests find each of them."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from tests.faults.test_sqlite_callers import give_up_before_it_begins, play
from tests.faults.test_sqlite_wake_ups import listing_is_bounded, planted_link_is_not_followed
from tests.unit.store.sqlite.test_sqlite_writer import stage, take_over_beside_other_work

from onefold.store.sqlite import notify, store
from onefold.store.sqlite.session import Session
from onefold.store.sqlite.writer.connection import Call
from onefold.store.sqlite.writer.writer import Writer


def test_a_directory_taken_as_found_loses_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It follows a link, checks no owner and removes files that refuse a byte: a user's files are gone."""

    def enter(self: notify.Listeners) -> None:
        self._leave()
        self._descriptor = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)

    monkeypatch.setattr(notify.Listeners, "_enter", enter)
    monkeypatch.setattr(notify.Listeners, "_is_socket", lambda self, name: True)
    with pytest.raises(AssertionError):
        planted_link_is_not_followed(tmp_path)


def test_a_listing_without_a_limit_reads_all_that_was_planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the limit, every entry is looked at on the event loop."""
    monkeypatch.setattr(notify, "islice", lambda entries, _: entries)
    with pytest.raises(AssertionError):
        listing_is_bounded(tmp_path, monkeypatch)


def test_doubting_a_lease_at_every_look_starves_the_takeover(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A claimer that leaves a lease to its owner whenever it has not looked for a while never takes over."""

    def extend_always(session: Session, grace_micros: int) -> bool:
        steady = session.clock.steady()
        session.connection.execute(
            "UPDATE onefold_delivery SET lease_until = ? WHERE state = 1 AND lease_until <= ?",
            (steady + grace_micros, steady),
        )
        return False

    monkeypatch.setattr(store, "extend_once", extend_always)

    async def scenario() -> None:
        async with stage(tmp_path / "shop.db") as made:
            await take_over_beside_other_work(made)

    with pytest.raises(AssertionError, match="not taken over"):
        asyncio.run(scenario())


def test_running_what_was_given_up_repeats_the_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of a cancelled caller is run all the same: four rows instead of one."""
    monkeypatch.setattr(Writer, "_give_up", lambda self, turn, call: None)
    monkeypatch.setattr(Call, "is_given_up", lambda self: False)
    with pytest.raises(AssertionError, match="payment"):
        play(tmp_path / "shop.db", "apsw", give_up_before_it_begins)
