"""A typical first web shop: FastAPI, SQLAlchemy with aiosqlite, and onefold on the same SQLite file.

``onefold worker web_shop:app`` finds the file in ``ONEFOLD_URL``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from onefold import App, Context

app = App()


@app.task(key="{order}")
async def charge(ctx: Context, order: int) -> None:
    await ctx.execute("INSERT INTO payment VALUES (?)", order)


def make_web(path: Path) -> FastAPI:
    """Return the web application: its rows go through the ORM, its messages through onefold."""
    # Without a pool each request opens and closes the file, which drops the locks of another library.
    engine = create_async_engine(f"sqlite+aiosqlite:///{path}", poolclass=NullPool, connect_args={"timeout": 30})

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with app:
            yield
        await engine.dispose()

    web = FastAPI(lifespan=lifespan)

    @web.post("/orders/{order}")
    async def place(order: int) -> str:
        async with engine.begin() as connection:
            await connection.execute(text("INSERT INTO orders VALUES (:order)"), {"order": order})
        return (await charge.send(order)).id

    @web.get("/orders")
    async def count() -> int:
        async with engine.connect() as connection:
            return int((await connection.execute(text("SELECT count(*) FROM orders"))).scalar_one())

    return web
