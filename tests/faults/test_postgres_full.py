"""PostgreSQL reports a full disk, as it does for a write that needs a new page."""

from __future__ import annotations

import asyncio

import psycopg
import pytest

from onefold import App, Context, Query, State, StoreUnavailableError
from onefold.worker import execution

#: Raises the server's own error and code when the tables grow.
_FILL = """
CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN RAISE EXCEPTION 'could not extend file: No space left on device' USING ERRCODE = 'disk_full'; END $$;
CREATE TRIGGER full_disk BEFORE INSERT ON onefold.message FOR EACH STATEMENT EXECUTE FUNCTION full_disk();
CREATE TRIGGER full_disk BEFORE INSERT ON onefold.outcome FOR EACH STATEMENT EXECUTE FUNCTION full_disk();
"""
_MAKE_ROOM = "DROP FUNCTION full_disk CASCADE"


def test_a_full_server_refuses_sends_and_burns_no_attempt_until_there_is_room(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault 12: a retryable typed error, nothing half-written, reads work, and work continues by itself."""
    monkeypatch.setattr(execution, "UNAVAILABLE_SECONDS", 0.1)
    app = App(postgres_url)

    @app.task(key="{number}")
    async def write(ctx: Context, number: int) -> int:
        await ctx.execute("INSERT INTO effect VALUES (%s)", number)
        return number

    def administer(statement: str) -> None:
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            connection.execute(statement)  # type: ignore[arg-type]

    async def scenario() -> None:
        await app.migrate()
        async with asyncio.timeout(30), app:
            await asyncio.to_thread(administer, "CREATE TABLE effect (number int)")
            before = await write.send(1)
            await asyncio.to_thread(administer, _FILL)
            with pytest.raises(StoreUnavailableError, match="No space left"):
                await write.send(2)
            working = asyncio.create_task(app.work())
            while not await app.store.attempts(before.id) and (await app.find(Query()))[0].fence < 4:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            (record,) = await app.find(Query())
            assert (record.envelope.id, record.state.ended, record.attempt) == (before.id, False, 0)
            assert await app.store.fetch("SELECT count(*) FROM effect") == [(0,)]
            await asyncio.to_thread(administer, _MAKE_ROOM)
            after = await write.send(2)
            assert [await one.result() for one in (before, after)] == [1, 2]
            app.stop_working()
            await working
            assert sorted(await app.store.fetch("SELECT number FROM effect")) == [(1,), (2,)]
            assert {one.state for one in await app.find(Query())} == {State.DONE}

    asyncio.run(scenario())
