"""With a synchronous standby, what was answered as done is on the standby too, however its commit was ended."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

import pytest
from fault_scene import Loop, run
from standby_scene import (
    WAYS,
    Waiters,
    absent,
    ask,
    ended_waits_are_not_answered,
    message,
    release_standby,
    require_standby,
    short_waits,
)

from onefold import StoreError, StoreUnavailableError
from onefold.stores.postgres import PostgresStore
from onefold.stores.postgres import store as store_module
from onefold.testing.servers import PostgresServer, PostgresStandby


@pytest.mark.parametrize("way", WAYS)
def test_a_commit_whose_wait_for_the_standby_is_ended_is_not_answered_as_done(
    way: str, loop: Loop, postgres_server: PostgresServer, postgres_url: str
) -> None:
    """Faults 5 and 8: puts, settles, records and claims, alone and in transactions; cancelled, ended, restarted."""
    with short_waits():
        run(lambda: ended_waits_are_not_answered(way, postgres_server, postgres_url), loop=loop)


def test_nothing_that_was_answered_is_absent_on_the_promoted_standby() -> None:
    """Fault 8: the standby is cut off, commits are ended, the primary is lost, the standby promoted."""
    settings = {"synchronous_standby_names": "standby"}
    with PostgresServer(settings=settings) as primary, PostgresStandby(primary) as standby:
        url = primary.create_database("shop")
        waiters = Waiters(url)

        async def scenario() -> None:
            await waiters.prepare()
            standby.kill()
            for way in ("cancel", "immediate"):
                await waiters.end_all(way, primary)
            await asyncio.to_thread(primary.kill)
            await asyncio.to_thread(standby.restart)
            await asyncio.to_thread(standby.promote)
            await waiters.store.close()

        with short_waits():
            run(scenario)
        assert waiters.answered
        assert absent(standby.url("shop"), waiters.answered) == []


def test_a_store_closes_in_time_while_its_commits_wait(
    loop: Loop, postgres_server: PostgresServer, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Faults 8 and 40: whoever still waits gets a typed error, and none of it hangs with the server."""
    monkeypatch.setattr(store_module, "_CLOSE_SECONDS", 0.2)

    async def scenario() -> None:
        store = PostgresStore(postgres_url)
        await store.migrate()
        await store.open()
        try:
            require_standby(postgres_server)
            puts = [asyncio.create_task(store.put([message(f"k{number}")])) for number in range(3)]
            await asyncio.sleep(0.2)
            async with asyncio.timeout(CLOSED_SECONDS_MAX):
                await store.close()
                await asyncio.wait(puts)
            # One was under way, and the others had not begun.
            assert all(isinstance(put.exception(), StoreError) for put in puts)
            assert any(isinstance(put.exception(), StoreUnavailableError) for put in puts)
        finally:
            release_standby(postgres_server)

    run(scenario, loop=loop)


#: A fraction of what waiting for the answers would take.
CLOSED_SECONDS_MAX = 5.0


def test_a_read_replica_is_named_as_such(postgres_server: PostgresServer, postgres_url: str) -> None:
    """A server that takes no writes can be read, and a send says what is wrong and what to do about it."""

    async def scenario() -> None:
        store = PostgresStore(postgres_url, patience=0.1)
        await store.migrate()
        database = urlsplit(postgres_url).path.strip("/")
        ask(postgres_server.url(), f"ALTER DATABASE {database} SET default_transaction_read_only = on")  # type: ignore[arg-type]
        await store.open()
        try:
            assert await store.count() == {}
            with pytest.raises(StoreUnavailableError, match=r"read replica.*target_session_attrs=read-write"):
                await store.put([message("k")])
        finally:
            await store.close()

    run(scenario)
