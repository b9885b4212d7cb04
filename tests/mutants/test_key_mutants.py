"""Defects of keys, put back: the contract of the stores, the random sends and the promises find each of them."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest
from hypothesis.errors import Flaky
from tests.promises.test_upstream_keys import two_databases_share_no_key
from tests.simulation.test_key_machine import SQLITE_OPTIONS, check_keys
from tests.unit.brokers.test_intake_and_relay import one_key_for_one_order

from onefold.app import base as apps
from onefold.brokers import admission as reception
from onefold.clock import Clock
from onefold.errors import KeyReuseError
from onefold.message.envelope import Envelope
from onefold.store import Store
from onefold.store.identity import Origin
from onefold.store.open import open_store
from onefold.store.shared import duplicates as keys
from onefold.testing.contracts.keys import KeyContract


class _OnSQLite(KeyContract):
    """The contract of keys, on a new file for each scenario."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def make_store(self, clock: Clock) -> Store:
        return open_store(f"sqlite:///{self._path}/onefold.db", clock=clock)


@pytest.fixture
def plain_keys_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys of messages without a deduplication key are taken before the others of their put are judged."""

    def only_windowed(envelopes: Collection[Envelope]) -> set[str]:
        return {e.id for e in envelopes if e.deduplication_key is not None}

    monkeypatch.setattr(keys, "in_turn", only_windowed)


@pytest.mark.usefixtures("plain_keys_first")
def test_plain_keys_first_stores_one_key_twice(tmp_path: Path) -> None:
    """In one put, and with senders at once that share a commit: both messages are stored."""
    contract = _OnSQLite(tmp_path)
    with pytest.raises(AssertionError):
        contract.test_messages_of_one_put_are_judged_in_their_order()
    with pytest.raises(AssertionError):
        contract.test_senders_at_once_with_and_without_a_window_store_one_message()


@pytest.mark.usefixtures("plain_keys_first")
@pytest.mark.parametrize("options", SQLITE_OPTIONS)
def test_plain_keys_first_is_found_by_random_sends(tmp_path: Path, options: str) -> None:
    """The machine finds it within the number of stories that the test suite runs.

    The two stores take turns at the file by real time, so the same story may end well when it is told again.
    """
    with pytest.raises((AssertionError, Flaky)):
        check_keys(f"sqlite:///{tmp_path}/onefold.db{options}", 60, 12, fixed=True)


def test_keys_without_an_origin_are_shared_by_two_databases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Orders of one shop are then answered with the charges of another."""

    async def nowhere(*_: object) -> Origin:
        return Origin("", "")

    monkeypatch.setattr(apps, "find_origin", nowhere)
    with pytest.raises(AssertionError):
        two_databases_share_no_key(f"sqlite:///{tmp_path}/a.db", f"sqlite:///{tmp_path}/b.db")


def test_a_key_that_is_taken_from_the_wire_charges_one_order_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And blocks another order, although the task declares how its keys are made."""
    monkeypatch.setattr(reception, "_identify", lambda sent, task: (sent.idempotency_key, sent.fingerprint))
    with pytest.raises((AssertionError, KeyReuseError)):
        one_key_for_one_order(f"sqlite:///{tmp_path}/onefold.db")
