"""Orders fulfilled by a saga, and undone where they fail: ``python examples/fulfilment.py``.

Each order reserves goods, takes the payment and hands over a parcel.  Some customers live where no parcel service
delivers, and for some the bank does not answer, with or without taking the money.  After a failure the earlier steps
are undone in reverse, and so is a step with an unknown outcome.  At the end the books must balance.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

from rich.console import Console

from onefold import App, Context, RetryPolicy, Run, SagaStatus, never
from onefold.cli.tree import draw
from onefold.testing import FakeClock, drain

ORDERS = 60
PRICE = 25

clock = FakeClock()  # retries wait for hours, which pass at once on this clock
app = App(clock=clock)  # the store is named by ONEFOLD_URL
once = RetryPolicy(max_attempts=1)


async def book(ctx: Context, account: str, order: int, amount: int) -> None:
    """Write a line into the books, together with the record of the step; this SQL runs on both stores."""
    await ctx.execute(f"INSERT INTO book (account, order_id, amount) VALUES ('{account}', {order:d}, {amount:d})")


async def release(ctx: Context, order: int) -> None:
    await book(ctx, "stock", order, 1)


@app.step(undo=release)
async def reserve(ctx: Context, order: int) -> None:
    await book(ctx, "stock", order, -1)


async def pay_back(ctx: Context, order: int) -> None:
    """Undo a payment that may never have been made: look it up first, in the same commit."""
    rows = await ctx.execute(f"SELECT sum(amount) FROM book WHERE account = 'bank' AND order_id = {order:d}")
    if rows[0][0]:
        await book(ctx, "bank", order, -PRICE)


@app.step(undo=pay_back, retry=once)
async def take_payment(ctx: Context, order: int) -> None:
    if order % 7 == 3:
        raise TimeoutError("the bank did not answer")
    await book(ctx, "bank", order, PRICE)


async def call_back(ctx: Context, order: int) -> None:
    rows = await ctx.execute(f"SELECT sum(amount) FROM book WHERE account = 'parcels' AND order_id = {order:d}")
    if rows[0][0]:
        await book(ctx, "parcels", order, -1)


@app.step(undo=call_back, retry=once)
async def hand_over(ctx: Context, order: int) -> None:
    if order % 5 == 4:
        raise ValueError("no carrier ships there")
    await book(ctx, "parcels", order, 1)


@app.step(undo=never("a mail cannot be called back, and thanking twice does no harm"))
async def thank(order: int) -> None:
    """Stands for a mail server."""


@app.saga(key="{order}", subject="order:{order}")
async def fulfil(run: Run, order: int) -> str:
    await run.step(reserve, order)
    await run.step(take_payment, order)
    await run.step(hand_over, order)
    await run.step(thank, order)
    return "shipped"


async def play(console: Console, orders: int = ORDERS) -> Counter[SagaStatus]:
    """Fulfil orders and return how many ended in each state; raise if the books do not balance."""
    await app.migrate()
    async with app:
        async with app.transaction() as tx:
            await tx.execute("CREATE TABLE book (account TEXT, order_id BIGINT, amount BIGINT)")
        receipts = await app.send_many(fulfil.call(order) for order in range(orders))
        await drain(app)
        ends: Counter[SagaStatus] = Counter()
        for receipt in receipts:
            found = await app.saga_status(receipt.id)
            assert found is not None
            ends[found.status] += 1
        for order in (0, 4):
            shown = await app.chronicle(receipts[order].id)
            assert shown is not None
            console.print(draw(shown, clock.moment), "")
        shipped = ends[SagaStatus.COMPLETED]
        rows = await app.store.fetch("SELECT account, sum(amount) FROM book GROUP BY account")
        books = {account: int(amount) for account, amount in rows}
        assert books == {"stock": -shipped, "bank": shipped * PRICE, "parcels": shipped}, books
        return ends


def main() -> int:
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory(prefix="onefold-orders-") as directory:
        os.environ.setdefault("ONEFOLD_URL", f"sqlite:///{Path(directory) / 'orders.db'}")
        ends = asyncio.run(play(console))
    told = ", ".join(f"{number} {status}" for status, number in ends.items())
    console.print(f"[green]{ORDERS} orders: {told}; stock, bank and parcels agree.[/]")
    return 0


if __name__ == "__main__":
    sys.exit(main())
