"""A worker as a program of its own, to be stopped and killed: ``crash_worker.py URL NAME MIDDLE``.

``MIDDLE`` says where its handler pauses for a moment and says so: ``before`` its first write, ``after`` it, or never.
"""

from __future__ import annotations

import asyncio
import sys

from onefold import App, Context


def make_app(url: str, name: str, middle: str = "") -> App:
    app = App(url)
    insert = "INSERT INTO effect VALUES (?, ?, ?, ?)"
    if url.startswith("postgres"):
        insert = insert.replace("?", "%s")

    @app.task(key="{key}", subject="{key}")
    async def pay(ctx: Context, key: str) -> None:
        await pause("before")
        await ctx.execute(insert, f"pay:{key}", ctx.message.id, ctx.fence, name)
        await pause("after")

    async def pause(where: str) -> None:
        if where == middle:
            print("in the middle", flush=True)
            await asyncio.sleep(1.0)

    return app


async def work(url: str, name: str, middle: str) -> None:
    async with make_app(url, name, middle) as app:
        print("ready", flush=True)
        await app.work(name=name, lease=1.0)


if __name__ == "__main__":
    asyncio.run(work(*sys.argv[1:4]))
