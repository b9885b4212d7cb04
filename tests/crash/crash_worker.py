"""A worker in a process of its own, for tests that stop and kill it: ``crash_worker.py URL NAME MIDDLE``.

``MIDDLE`` says where it prints a line and pauses for a moment: ``before`` the first write of its handler, ``after``
it, when its outcome is ``committed`` but the worker has not seen the answer, or never.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

from onefold import App, Context

#: Long enough for the test to stop the process.
PAUSE_SECONDS = 1.0


def open_traced(url: str, trace: Any) -> Any:
    if url.startswith("sqlite"):
        from onefold.store.sqlite import SQLiteStore

        return SQLiteStore(url.removeprefix("sqlite:///"), trace=trace)
    from onefold.store.postgres import PostgresStore

    return PostgresStore(url, trace=trace)


def make_app(url: str, name: str, middle: str = "") -> App:
    ran = False

    def trace(moment: str, statement: str) -> None:
        nonlocal ran
        if ran and moment == "after" and statement.startswith("COMMIT"):
            ran = False
            print("in the middle", flush=True)
            time.sleep(PAUSE_SECONDS)

    app = App(store=open_traced(url, trace)) if middle == "committed" else App(url)
    insert = "INSERT INTO effect VALUES (?, ?, ?, ?)"
    if url.startswith("postgres"):
        insert = insert.replace("?", "%s")

    @app.task(key="{key}", subject="{key}")
    async def pay(ctx: Context, key: str) -> None:
        await pause("before")
        await ctx.execute(insert, f"pay:{key}", ctx.message.id, ctx.fence, name)
        await pause("after")
        nonlocal ran
        ran = True

    async def pause(where: str) -> None:
        if where == middle:
            print("in the middle", flush=True)
            await asyncio.sleep(PAUSE_SECONDS)

    return app


async def work(url: str, name: str, middle: str) -> None:
    async with make_app(url, name, middle) as app:
        print("ready", flush=True)
        await app.work(name=name, lease=1.0)


if __name__ == "__main__":
    asyncio.run(work(*sys.argv[1:4]))
