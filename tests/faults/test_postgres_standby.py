"""With a synchronous standby, an operation answered as done is on the standby too, however its commit was ended."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from datetime import timedelta
from urllib.parse import urlsplit

import pytest
from fault_scene import Loop, run, until
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

from onefold import App, ConfigurationError, StoreError, StoreUnavailableError
from onefold.store.postgres import PostgresStore
from onefold.store.postgres import store as store_module
from onefold.store.postgres.wire import connect as connection
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
    """Faults 8 and 40: callers that still wait get a typed error, and the close does not hang with the server."""
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
            # One put was under way, and the others had not begun.
            assert all(isinstance(put.exception(), StoreError) for put in puts)
            assert any(isinstance(put.exception(), StoreUnavailableError) for put in puts)
        finally:
            release_standby(postgres_server)

    run(scenario, loop=loop)


#: A fraction of the time that waiting for the answers would take.
CLOSED_SECONDS_MAX = 5.0


def make_read_only(server: PostgresServer, url: str, *, on: bool) -> None:
    """Make a database refuse writes, or accept them again, for new sessions; end the existing ones."""
    database = urlsplit(url).path.strip("/")
    value = "on" if on else "off"
    ask(server.url(), f"ALTER DATABASE {database} SET default_transaction_read_only = {value}")  # type: ignore[arg-type]
    ask(server.url(), "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", database)


@pytest.mark.alone
def test_a_read_replica_is_named_as_such(postgres_server: PostgresServer, postgres_url: str) -> None:
    """A server that refuses writes can be read; a send and a worker report the problem and the remedy at once."""

    async def scenario() -> None:
        async with App(postgres_url) as primary:
            handle = primary.task(name="handle")(_handle)
            await handle.send()
        make_read_only(postgres_server, postgres_url, on=True)
        app = App(postgres_url)
        handle = app.task(name="handle")(_handle)
        async with app, asyncio.timeout(CLOSED_SECONDS_MAX):
            assert (await app.count())["default"].scheduled == 1
            for verb in (handle.send, lambda: app.work(until_idle=True), lambda: app.send_many([handle.call()])):
                with pytest.raises(ConfigurationError, match=r"read replica.*target_session_attrs=read-write"):
                    await verb()
            make_read_only(postgres_server, postgres_url, on=False)
            await handle.send()

    run(lambda: _migrated(postgres_url))
    run(scenario)


async def _handle() -> None: ...


async def _migrated(url: str) -> None:
    await App(url).migrate()


def test_a_worker_whose_server_takes_no_writes_any_more_waits(
    postgres_server: PostgresServer, postgres_url: str
) -> None:
    """Fault 8: with schedules and messages; when the server accepts writes again, all of them continue."""

    async def scenario() -> None:
        store = PostgresStore(postgres_url, patience=0.1)
        app = App(store=store)
        ran: list[int] = []

        @app.task
        async def handle(number: int) -> None:
            ran.append(number)

        @app.recurring(every=timedelta(seconds=1), mode="rate")
        async def tick() -> None:
            ran.append(-1)

        await app.migrate()
        async with app:
            await handle.send(1)
            working = asyncio.create_task(app.work())
            await until(lambda: _true(1 in ran))
            make_read_only(postgres_server, postgres_url, on=True)
            await asyncio.sleep(1.5)
            assert not working.done()
            make_read_only(postgres_server, postgres_url, on=False)
            ticks = ran.count(-1)
            await until(lambda: _can(handle.send(2)))
            await until(lambda: _true(2 in ran and ran.count(-1) > ticks))
            app.stop_working()
            await working

    run(scenario)


async def _true(value: bool) -> bool:
    return value


async def _can(send: Awaitable[object]) -> bool:
    try:
        await send
    except StoreError:
        return False
    return True


def test_a_primary_that_was_replaced_and_comes_back_is_refused(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault 8: by a program that has seen the timeline of the primary which took its place."""
    ((server,),) = ask(postgres_url, "SELECT system_identifier::text FROM pg_control_system()")

    async def scenario() -> None:
        store = PostgresStore(postgres_url, patience=0.1)
        await store.migrate()
        await store.open()
        assert connection._newest_timeline[server] == 1
        monkeypatch.setitem(connection._newest_timeline, server, 2)
        await store.close()
        with pytest.raises(StoreUnavailableError, match=r"replaced and came back: its timeline is 1.*seen 2"):
            await store.open()

    run(scenario)


@pytest.mark.deep
def test_a_promoted_standby_has_a_newer_timeline_than_its_old_primary() -> None:
    """Fault 8: two real servers; a program that has written to the new one does not write to the old one."""
    with PostgresServer() as primary, PostgresStandby(primary) as standby:
        url = primary.create_database("shop")

        async def scenario() -> None:
            store = PostgresStore(url)
            await store.migrate()
            await store.open()
            await store.close()
            await asyncio.to_thread(standby.promote)
            newer = PostgresStore(standby.url("shop"))
            await until(lambda: _can(newer.open()))
            await newer.put([message("k")])
            await newer.close()
            with pytest.raises(StoreUnavailableError, match="replaced and came back"):
                await PostgresStore(url, patience=0.1).open()

        run(scenario)
