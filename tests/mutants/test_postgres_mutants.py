"""Defects of callers' SQL on PostgreSQL, put back: the checks of the real tests find each of them."""

from __future__ import annotations

import asyncio
from typing import Any

import psycopg
import pytest
import test_postgres_callers as callers
from psycopg.adapt import PyFormat, Transformer
from test_postgres_engine import run

from onefold import limits
from onefold.errors import SessionLostError, StoreUnavailableError
from onefold.store import Again, Lease
from onefold.store.postgres.wire import handler_wire as handling
from onefold.store.postgres.wire import pool
from onefold.store.postgres.wire.handler_wire import HandlerWire
from onefold.store.postgres.wire.pool import Pool
from onefold.store.postgres.wire.statements import WireQuery
from onefold.store.postgres.wire.wire import Wire, load_rows
from onefold.worker import execution


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "UNAVAILABLE_SECONDS", 0.02)
    monkeypatch.setattr(callers, "RESULT_SECONDS", 2.5)


class _Numbering:
    """Prepares callers' statements under numbers that start again with each connection."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.numbers: dict[bytes, int] = {}

    async def execute(self, wire: Any, statement: str, parameters: Any = ()) -> Any:
        text = statement.encode()
        number = self.numbers.setdefault(text, len(self.numbers))
        for place in range(len(parameters)):
            text = text.replace(b"%s", b"$%d" % (place + 1), 1)
        transformer = Transformer.from_context(wire.connection)
        data = transformer.dump_sequence(list(parameters), [PyFormat.AUTO] * len(parameters))
        query = WireQuery(text, data, transformer.formats, transformer.types, b"caller_%d" % number, result_format=0)
        if not wire.alive:
            # Sent again under its old number on a connection whose numbers start again.
            self.numbers.clear()
            wire._use(await psycopg.AsyncConnection.connect(self.url, autocommit=True))
            await wire.begin("BEGIN")
        (result,) = await wire._ask([query], [])
        return load_rows(Transformer.from_context(wire.connection), result)


def test_numbers_of_our_own_that_outlive_their_connection_are_found(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first statement that is sent again on another connection leaves its name to a later, different one."""
    numbering = _Numbering(postgres_url)

    async def execute(wire: HandlerWire, statement: str, parameters: Any = ()) -> Any:
        return await numbering.execute(wire, statement, parameters)

    monkeypatch.setattr(HandlerWire, "execute", execute)
    with pytest.raises(AssertionError):
        run(lambda: callers.check_statements_are_not_confused(postgres_url))


def test_a_lost_session_that_never_counts_is_found(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A statement that ends its session each time is retried for ever."""

    def uncounted(lease: Lease, error: SessionLostError, quarantine_after: int, *, delay: float) -> Again:
        return Again(delay, None, counted=False)

    monkeypatch.setattr(execution, "blame", uncounted)
    with pytest.raises(AssertionError):
        run(lambda: callers.check_a_statement_that_ends_its_session_is_bounded(postgres_url, 0))


def test_a_first_statement_that_is_sent_again_is_found(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence shows that the statement ran more often than its handler, whatever became of the first session."""
    once = HandlerWire.execute

    async def again(wire: HandlerWire, statement: Any, parameters: Any = ()) -> Any:
        try:
            return await once(wire, statement, parameters)
        except psycopg.OperationalError:
            wire._use(await psycopg.AsyncConnection.connect(postgres_url, autocommit=True))
            await wire.begin("BEGIN")
            return await once(wire, statement, parameters)

    monkeypatch.setattr(HandlerWire, "execute", again)
    with pytest.raises(AssertionError):
        run(lambda: callers.check_a_statement_that_ends_its_session_is_bounded(postgres_url, 0))


async def _leave_running(_: Any, **__: Any) -> None:
    """Send no cancellation to the server."""


def test_a_limit_that_cancels_nothing_is_found(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The statement continues and keeps its locks, and its handler gets a lost connection."""
    monkeypatch.setattr(limits, "TRANSACTION_SECONDS_MAX", 0.2)
    monkeypatch.setattr(handling, "ROLLBACK_SECONDS", 0.2)
    monkeypatch.setattr(HandlerWire, "_interrupt", _leave_running)
    with pytest.raises(AssertionError):
        run(lambda: callers.check_the_limit_cancels_and_counts(postgres_url))


def test_a_cancelled_caller_that_leaves_its_statement_running_is_found(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handling.CallersConnection, "cancel_safe", _leave_running)
    with pytest.raises((AssertionError, TimeoutError)):
        run(lambda: callers.check_a_callers_timeout_is_kept(postgres_url))


def test_a_cancelled_commit_is_found(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A COMMIT is cancelled with its caller like any other statement."""

    async def interrupt(wire: HandlerWire) -> None:
        await wire.connection.cancel_safe(timeout=1)

    monkeypatch.setattr(handling, "COMMIT_SECONDS", 0.02)
    monkeypatch.setattr(HandlerWire, "_interrupt", interrupt)
    with pytest.raises(AssertionError):
        run(lambda: callers.check_a_commit_is_left_alone(postgres_url))


def test_plans_that_are_kept_when_a_table_changes_are_found(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The handler fails with "cached plan must not change result type"."""
    monkeypatch.setattr(handling, "is_stale_plan", lambda _: False)
    with pytest.raises(AssertionError):
        run(lambda: callers.check_changed_tables_cost_nothing(postgres_url))


def test_a_connection_that_is_given_back_by_its_cancelled_caller_is_found_missing(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that its caller has to clean is lost when the caller is cancelled again."""
    give_back = Pool.give_back

    def only_if_clean(self: Pool, wire: HandlerWire) -> None:
        task = asyncio.current_task()
        if wire.clean or task is None or not task.cancelling():
            give_back(self, wire)

    monkeypatch.setattr(pool.Pool, "give_back", only_if_clean)
    with pytest.raises((AssertionError, StoreUnavailableError, TimeoutError)):
        run(lambda: callers.check_no_place_is_lost(postgres_url))


@pytest.mark.parametrize("fails", [False, True])
def test_a_transaction_without_its_mark_is_found(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """A plain COMMIT or ROLLBACK succeeds although the handler has ended the transaction: the effect happens twice."""

    async def commit(wire: HandlerWire, *last: Any) -> None:
        wire._marked = False
        await Wire.commit(wire, *last)

    monkeypatch.setattr(HandlerWire, "commit", commit)
    monkeypatch.setattr(handling, "has_ended", lambda _: False)
    with pytest.raises(AssertionError):
        run(lambda: callers.check_an_early_end_is_noticed(postgres_url, "SELECT 1; COMMIT", fails=fails))


@pytest.mark.parametrize("lent", [False, True])
def test_sessions_that_are_not_reset_are_found(postgres_url: str, monkeypatch: pytest.MonkeyPatch, lent: bool) -> None:
    monkeypatch.setattr(handling, "_RESETTING", [])
    monkeypatch.setattr(handling, "_DISCARD", WireQuery(b"DEALLOCATE ALL"))
    with pytest.raises(AssertionError):
        run(lambda: callers.check_sessions_are_reset(postgres_url, lent=lent, fails=False))
