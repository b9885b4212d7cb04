"""Defects by which answers do not wait for the synchronous standby, put back: ``tests/faults`` finds them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.faults.standby_scene import ended_waits_are_not_answered, short_waits

from onefold.store.postgres.wire import pipeline as exchange
from onefold.store.postgres.wire.wire import Wire
from onefold.testing.servers import PostgresServer


def _check(way: str, server: PostgresServer, url: str) -> None:
    with short_waits():
        asyncio.run(asyncio.wait_for(ended_waits_are_not_answered(way, server, url), 60))


def test_a_warning_that_is_not_read_is_taken_for_a_replicated_commit(
    postgres_server: PostgresServer, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server reports a cancelled wait as a success with a warning."""
    monkeypatch.setattr(exchange, "is_wait_ended", lambda notice: False)
    with pytest.raises(AssertionError, match="on no standby"):
        _check("cancel", postgres_server, postgres_url)


def test_a_look_up_that_only_reads_answers_before_the_standby_has_it(
    postgres_server: PostgresServer, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a terminated wait the commit can be read, but on the primary alone."""
    rows = Wire.rows

    async def read_only(self: Wire, name: str, parameters: Any = None) -> list[tuple[Any, ...]]:
        return [] if name == "replicated" else await rows(self, name, parameters)

    monkeypatch.setattr(Wire, "rows", read_only)
    with pytest.raises(AssertionError, match="on no standby"):
        _check("terminate", postgres_server, postgres_url)
