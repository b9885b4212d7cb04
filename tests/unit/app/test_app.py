"""The app: opening, the surroundings of handlers, and transactions of producers."""

from __future__ import annotations

import asyncio
import gc
import sys
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from onefold import (
    App,
    ConfigurationError,
    Context,
    Envelope,
    EnvelopeError,
    HandlerError,
    KeyReuseError,
    Reject,
    StoreError,
    TransactionOpenError,
)
from onefold.store import State
from onefold.store.open import open_store

if TYPE_CHECKING:
    from tests.unit.conftest import Bench


# opening


def test_the_url_is_read_from_the_environment(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Q3: ``App()`` without a URL."""
    monkeypatch.setenv("ONEFOLD_URL", sqlite_url)

    async def scenario() -> None:
        async with App() as app:
            assert await app.count() == {}

    asyncio.run(scenario())
    assert Path(sqlite_url.removeprefix("sqlite:///")).exists()


@pytest.mark.parametrize("url", [None, "mysql://localhost/db", "shop.db", "sqlite:///", "sqlite://shop.db", "://"])
def test_an_app_without_a_usable_url_says_what_to_write(url: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """P3: when it is opened, and no file is created."""
    monkeypatch.delenv("ONEFOLD_URL", raising=False)
    with pytest.raises(ConfigurationError, match="sqlite:///"):
        asyncio.run(App(url).open())


def test_an_unknown_option_in_the_url_is_refused(sqlite_url: str) -> None:
    """P3: a misspelt option would silently weaken the promise."""
    with pytest.raises(ConfigurationError, match="syncronous"):
        asyncio.run(App(f"{sqlite_url}?syncronous=full").open())
    with pytest.raises(ConfigurationError, match="FULLER"):
        asyncio.run(App(f"{sqlite_url}?synchronous=fuller").open())


def test_a_closed_app_says_so(sqlite_url: str) -> None:
    """P3: closing or opening twice is harmless."""
    app = App(sqlite_url)

    @app.task
    async def ping() -> None: ...

    async def scenario() -> None:
        with pytest.raises(ConfigurationError, match="not open"):
            await ping.send()
        await app.open()
        await app.open()
        await ping.send()
        store = app.store
        await app.close()
        await app.close()
        with pytest.raises(StoreError, match="closed"):
            await store.count()

    asyncio.run(scenario())


def test_included_modules_are_imported_when_the_app_opens(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P3: a worker finds the tasks of modules that nothing else imports."""
    (tmp_path / "included_tasks.py").write_text("loaded = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "included_tasks", raising=False)

    async def scenario() -> None:
        async with App(sqlite_url, include=["included_tasks"]):
            assert sys.modules["included_tasks"].loaded

    asyncio.run(scenario())
    with pytest.raises(ModuleNotFoundError):
        asyncio.run(App(sqlite_url, include=["no_such_module"]).open())


def test_override_uses_another_store_for_the_length_of_a_block(tmp_path: Path) -> None:
    """O4: a program needs no change to be tested."""
    app = App(f"sqlite:///{tmp_path}/real.db")

    @app.task
    async def ping() -> None: ...

    async def scenario() -> None:
        with app.override(store=open_store("sqlite:///:memory:")):
            async with app:
                await ping.send()
        assert not (tmp_path / "real.db").exists()
        async with app:
            assert await app.count() == {}
        assert (tmp_path / "real.db").exists()

    asyncio.run(scenario())


# around handlers


def test_lifespan_opens_once_per_worker_and_closes_at_its_end(bench: Bench) -> None:
    """P4: the yielded objects are ``ctx.resources`` of handlers."""
    happened: list[str] = []

    @bench.app.lifespan
    @asynccontextmanager
    async def resources() -> AsyncIterator[dict[str, str]]:
        happened.append("opened")
        yield {"pool": "a pool"}
        happened.append("closed")

    @bench.app.task
    async def use(ctx: Context) -> None:
        happened.append(ctx.resources["pool"])

    async def scenario() -> None:
        await bench.app.send_many([use.call(), use.call()])
        await bench.work()
        assert happened == ["opened", "a pool", "a pool", "closed"]

    bench.run(scenario)


def test_middleware_wraps_every_run_from_the_outside_in(bench: Bench) -> None:
    """P4: it sees the context, the result and the error, and may change the result."""
    happened: list[str] = []

    @bench.app.middleware
    async def outer(ctx: Context, proceed: Callable[[], Awaitable[Any]]) -> Any:
        happened.append(f"outer {ctx.message.message_type}")
        try:
            return f"<{await proceed()}>"
        except Reject:
            happened.append("outer saw it fail")
            raise

    @bench.app.middleware
    async def inner(ctx: Context, proceed: Callable[[], Awaitable[Any]]) -> Any:
        happened.append("inner")
        return await proceed()

    @bench.app.task
    async def good() -> str:
        happened.append("handler")
        return "done"

    @bench.app.task
    async def bad() -> None:
        raise Reject("no")

    async def scenario() -> None:
        sent = await good.send()
        await bench.work()
        assert happened == ["outer good", "inner", "handler"]
        assert await sent.result() == "<done>"
        dead = await bad.send()
        await bench.work()
        assert happened[-1] == "outer saw it fail"
        assert (await bench.record(dead)).state is State.DEAD

    bench.run(scenario)


def test_on_send_changes_every_message_on_every_way_out(bench: Bench) -> None:
    """M3: tags and traces can be added; the changed message is checked again."""

    @bench.app.on_send
    def tag(envelope: Envelope) -> Envelope:
        return msgspec.structs.replace(envelope, tags={"tenant": "t1"})

    @bench.app.task
    async def child() -> None: ...

    @bench.app.task
    async def parent(ctx: Context) -> None:
        ctx.send(child)

    async def scenario() -> None:
        await parent.send()
        await bench.app.send_many([child.call()])
        async with bench.app.transaction() as tx:
            tx.send(child)
        await bench.work()
        messages = await bench.messages()
        assert len(messages) == 4
        assert [record.envelope.tags for record in messages] == [{"tenant": "t1"}] * 4
        bench.app.on_send(lambda envelope: msgspec.structs.replace(envelope, subject="two\nlines"))
        with pytest.raises(EnvelopeError, match="subject"):
            await child.send()

    bench.run(scenario)


# the producer's commit


def test_rows_and_messages_of_a_transaction_commit_together_or_not_at_all(bench: Bench) -> None:
    """J1, B18: for tx.send, tx.send_many and an awaited send."""

    @bench.app.task
    async def ping(number: int) -> None: ...

    async def fails() -> None:
        async with bench.app.transaction() as tx:
            await bench.insert(tx, "undone")
            tx.send(ping, 1)
            tx.send_many([ping.call(2)])
            await ping.send(3)
            raise ZeroDivisionError

    async def scenario() -> None:
        with pytest.raises(ZeroDivisionError):
            await fails()
        assert (await bench.effects(), await bench.messages()) == ([], [])
        async with bench.app.transaction() as tx:
            await bench.insert(tx, "kept")
            receipts = [tx.send(ping, 1), *tx.send_many([ping.call(2)]), await ping.send(3)]
            assert await tx.fetch("SELECT name FROM effect") == [("kept",)]
            with pytest.raises(TransactionOpenError, match="after the commit"):
                assert receipts[0].duplicate
        assert [receipt.duplicate for receipt in receipts] == [False] * 3
        assert {record.envelope.id for record in await bench.messages()} == {receipt.id for receipt in receipts}
        assert await bench.effects() == ["kept"]

    bench.run(scenario)


def test_a_clash_of_keys_takes_the_whole_transaction_back(bench: Bench) -> None:
    """B25: nothing of it is stored, and the error names the first message."""

    @bench.app.task(key="{number}")
    async def ping(number: int, text: str) -> None: ...

    async def clashes() -> None:
        async with bench.app.transaction() as tx:
            await bench.insert(tx, "undone")
            tx.send(ping, 2, "b")
            tx.send(ping, 1, "other")

    async def scenario() -> None:
        first = await ping.send(1, "a")
        with pytest.raises(KeyReuseError) as refused:
            await clashes()
        assert refused.value.first_id == first.id
        assert (await bench.effects(), len(await bench.messages())) == ([], 1)

    bench.run(scenario)


def test_what_would_commit_apart_is_refused_inside_a_transaction(bench: Bench) -> None:
    """J1: on SQLite such a call would wait for its own transaction for ever."""

    @bench.app.task
    async def ping() -> None: ...

    async def scenario() -> None:
        before = await ping.send()
        async with bench.app.transaction():
            with pytest.raises(TransactionOpenError):
                await before.result()
            with pytest.raises(TransactionOpenError):
                async with bench.app.transaction():
                    pass
            with pytest.raises(TransactionOpenError):
                await bench.app.redrive([before.id], actor="ada", reason="fixed")
            with pytest.raises(TransactionOpenError):
                await bench.app.cancel(before.id, actor="ada", reason="not wanted")
            with pytest.raises(ConfigurationError, match=r"call send_many\(\) of the context"):
                await bench.app.send_many([ping.call()])

    bench.run(scenario)


def test_sending_after_the_transaction_is_over_is_an_error_and_not_a_lost_message(bench: Bench) -> None:
    """J1: a task started inside the block may outlive it."""

    @bench.app.task
    async def ping() -> None: ...

    async def scenario() -> None:
        over = asyncio.Event()

        async def late() -> None:
            await over.wait()
            await ping.send()

        async with bench.app.transaction() as tx:
            straggler = asyncio.create_task(late())
        over.set()
        with pytest.raises(HandlerError, match="would never be sent"):
            await straggler
        with pytest.raises(HandlerError, match="would never be sent"):
            tx.send(ping)
        assert await bench.messages() == []

    bench.run(scenario)


def test_a_send_that_is_not_awaited_is_reported(bench: Bench) -> None:
    """C25: Python itself warns, and nothing was stored."""

    @bench.app.task
    async def ping() -> None: ...

    async def scenario() -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ping.send()  # type: ignore[unused-coroutine]
            gc.collect()
        assert any("never awaited" in str(one.message) for one in caught)
        assert await bench.messages() == []

    bench.run(scenario)
