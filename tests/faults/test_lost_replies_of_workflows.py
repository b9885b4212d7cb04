"""The server of a workflow does what it is asked, but its answer is lost: each step takes effect once."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from fault_scene import run, until
from test_lost_replies import STATEMENTS_MAX, Loser, quiet

from onefold import App, Context, Receipt, Run, State
from onefold.store import Query
from onefold.store.postgres import PostgresStore
from onefold.testing.proxy import Proxy
from onefold.testing.servers import PostgresServer
from onefold.worker import execution


def declare(app: App) -> None:
    insert = "INSERT INTO effect VALUES (%s)"

    async def plain(key: str) -> str:
        return key

    async def write(ctx: Context, name: str) -> str:
        await ctx.execute(insert, name)
        return name

    @app.task
    async def child(ctx: Context, key: str) -> str:
        await ctx.execute(insert, f"child of {key}")
        return key

    @app.workflow(key="{key}")
    async def flow(run: Run, key: str) -> str:
        await run.step(plain, key)
        await run.step(write, f"first of {key}")
        told = await run.child(child, key)
        return await run.step(write, f"last of {told}")


def test_whichever_answer_is_lost_each_step_takes_effect_once(
    postgres_server: PostgresServer,
    postgres_url: str,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    """Fault 5, H7: including the COMMITs of steps, and of the parking that sends a child."""
    monkeypatch.setattr(execution, "UNAVAILABLE_SECONDS", 0.05)
    lost: list[str] = []

    async def scenario() -> None:
        loser = Loser()
        async with Proxy("127.0.0.1", postgres_server.port) as proxy:
            app = App(store=PostgresStore(proxy.through(postgres_url), trace=loser))
            declare(app)
            await app.migrate()
            async with app:
                async with app.transaction() as tx:
                    await tx.execute("CREATE TABLE effect (name TEXT)")
                loser.proxy = proxy
                receipts = list[Receipt[str]]()
                for number in itertools.count(1):
                    assert number < STATEMENTS_MAX
                    receipts.append(await app.tasks["flow"].send(f"run-{number}"))
                    await quiet()
                    loser.arm(number)
                    await app.work(until_idle=True, lease=1.0)
                    if not loser.lost:
                        break
                    lost.extend(loser.lost)

                async def ended() -> bool:
                    await app.work(until_idle=True, lease=1.0)
                    return not await app.find(Query(states=(State.SCHEDULED, State.LEASED, State.PARKED)))

                await until(ended)
                for number, receipt in enumerate(receipts, 1):
                    assert await receipt.result() == f"last of run-{number}"
                rows = await app.store.fetch("SELECT name FROM effect ORDER BY name")
                names = [f"{what} of {receipt}" for what in ("child", "first", "last") for receipt in _keys(receipts)]
                assert [row[0] for row in rows] == sorted(names)

    run(scenario)
    record_property("lost replies", len(lost))
    assert "COMMIT" in lost
    assert len(lost) >= 15


def _keys(receipts: list[Receipt[str]]) -> list[str]:
    return [f"run-{number}" for number in range(1, len(receipts) + 1)]
