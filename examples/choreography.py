"""An order, fulfilled by four services that know only each other's events: ``python examples/choreography.py``.

There is no coordinator.  Each service does its part in one commit and publishes an event about it; others react.
A failure is an event too, and services that have done their part undo it when they receive it::

    order.placed ──▶ payment ──▶ payment.taken ──▶ stock ──▶ stock.reserved ──▶ shipping ──▶ order.shipped
                        └─▶ payment.refused ─▶ order      └─▶ stock.refused ─▶ payment ─▶ payment.refunded ─▶ order

Three orders are placed, each twice, by customers who are not sure whether it worked: one is shipped, one finds no
stock, one has a card that is declined.  Shipping is down at first, and misses nothing.  ``ONEFOLD_URL`` names another
store.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from onefold import App, Context
from onefold.cli.chain import print_chain


@dataclass(frozen=True)
class Order:
    """The order, which is the payload of every event in this example."""

    id: int
    item: str
    cents: int


ORDERS = (Order(1, "lamp", 3_000), Order(2, "globe", 5_000), Order(3, "lamp", 90_000))
STOCK = {"lamp": 5, "globe": 0}
CARD_LIMIT = 10_000
TABLES = (
    "CREATE TABLE orders (id INTEGER PRIMARY KEY, state TEXT NOT NULL)",
    "CREATE TABLE payment (order_id INTEGER PRIMARY KEY, cents INTEGER NOT NULL)",
    "CREATE TABLE stock (item TEXT PRIMARY KEY, number INTEGER NOT NULL)",
    "CREATE TABLE parcel (order_id INTEGER NOT NULL)",
)
#: The expected end: the state of each order, the amount paid for it, and the number of parcels.
EXPECTED = {1: ("shipped", 3_000, 1), 2: ("cancelled", 0, 0), 3: ("cancelled", 0, 0)}


class Shop:
    """Four services on one store; each is an app of its own, as if it were another program."""

    def __init__(self, url: str) -> None:
        self.marks = "?" if url.startswith("sqlite") else "%s"
        self.order, self.payment, self.stock, self.shipping = (App(url) for _ in range(4))
        self.placed = self.order.topic("order.placed", Order, key="{event.id}", subject="order:{event.id}")
        self._declare_order()
        self._declare_payment()
        self._declare_stock()
        self._declare_shipping()

    @property
    def services(self) -> tuple[App, ...]:
        return self.order, self.payment, self.stock, self.shipping

    def sql(self, statement: str) -> str:
        """Write a statement with the placeholders of the store's driver."""
        return statement.replace("?", self.marks)

    async def place(self, order: Order) -> str:
        """Place an order: its row and its event are one commit, and doing it twice is harmless."""
        insert = "INSERT INTO orders VALUES (?, 'placed') ON CONFLICT DO NOTHING"
        async with self.order.transaction() as tx:
            await tx.execute(self.sql(insert), order.id)
            receipt = tx.publish(self.placed, order)
        return receipt.id

    def _declare_order(self) -> None:
        app, update = self.order, self.sql("UPDATE orders SET state = ? WHERE id = ?")

        @app.on("order.shipped", queue="order")
        async def close(ctx: Context, order: Order) -> None:
            await ctx.execute(update, "shipped", order.id)

        @app.on("payment.refused", queue="order")
        async def cancel_unpaid(ctx: Context, order: Order) -> None:
            await ctx.execute(update, "cancelled", order.id)

        @app.on("payment.refunded", queue="order")
        async def cancel_refunded(ctx: Context, order: Order) -> None:
            await ctx.execute(update, "cancelled", order.id)

    def _declare_payment(self) -> None:
        app = self.payment
        taken, refused = app.topic("payment.taken", Order), app.topic("payment.refused", Order)
        refunded = app.topic("payment.refunded", Order)

        @app.on("order.placed", queue="payment")
        async def charge(ctx: Context, order: Order) -> None:
            if order.cents > CARD_LIMIT:
                ctx.publish(refused, order)  # a failure is an event like any other, not an exception
                return
            await ctx.execute(self.sql("INSERT INTO payment VALUES (?, ?)"), order.id, order.cents)
            ctx.publish(taken, order)  # stored together with the row, or not at all

        @app.on("stock.refused", queue="payment")
        async def refund(ctx: Context, order: Order) -> None:
            await ctx.execute(self.sql("UPDATE payment SET cents = 0 WHERE order_id = ?"), order.id)
            ctx.publish(refunded, order)

    def _declare_stock(self) -> None:
        app = self.stock
        reserved, refused = app.topic("stock.reserved", Order), app.topic("stock.refused", Order)

        @app.on("payment.taken", queue="stock")
        async def reserve(ctx: Context, order: Order) -> None:
            take = "UPDATE stock SET number = number - 1 WHERE item = ? AND number > 0 RETURNING item"
            got = await ctx.execute(self.sql(take), order.item)
            ctx.publish(reserved if got else refused, order)

    def _declare_shipping(self) -> None:
        app = self.shipping
        shipped = app.topic("order.shipped", Order)

        @app.on("stock.reserved", queue="shipping")
        async def ship(ctx: Context, order: Order) -> None:
            await ctx.execute(self.sql("INSERT INTO parcel VALUES (?)"), order.id)
            ctx.publish(shipped, order)


async def work(*services: App) -> None:
    """Let services handle their messages until none of them has any."""
    while sum(await asyncio.gather(*(app.work(until_idle=True) for app in services))):
        pass


async def play(url: str, console: Console) -> dict[int, tuple[str, int, int]]:
    """Place the orders, let the services work, and return the state of each order."""
    shop = Shop(url)
    await shop.order.migrate()
    for app in shop.services:
        await app.open()
    try:
        await prepare(shop)
        console.print("every order is placed twice, because the customer is not sure; shipping is down")
        placed = [await shop.place(order) for order in ORDERS for _ in range(2)]
        await work(shop.order, shop.payment, shop.stock)
        waiting = (await shop.order.count())["shipping"].scheduled
        console.print(f"{waiting} message waits for shipping, which comes back now\n")
        await work(*shop.services)
        for message_id in placed[::2]:
            chain = await shop.order.chain(message_id)
            assert chain is not None
            print_chain(console, chain, message_id)
        return await look(shop)
    finally:
        for app in shop.services:
            await app.close()


async def prepare(shop: Shop) -> None:
    """Make the tables, and let every service subscribe once: from then on it may be down."""
    async with shop.order.transaction() as tx:
        for table in TABLES:
            await tx.execute(table)
        for item, number in STOCK.items():
            await tx.execute(shop.sql("INSERT INTO stock VALUES (?, ?)"), item, number)
    for app in shop.services:
        await app.subscribe()


async def look(shop: Shop) -> dict[int, tuple[str, int, int]]:
    """Read the state of each order, the amount paid for it, and the number of parcels."""
    rows = await shop.order.store.fetch(
        "SELECT o.id, o.state, coalesce((SELECT sum(cents) FROM payment p WHERE p.order_id = o.id), 0),"
        " (SELECT count(*) FROM parcel p WHERE p.order_id = o.id) FROM orders o ORDER BY o.id"
    )
    return {number: (state, int(paid), parcels) for number, state, paid, parcels in rows}


def main() -> int:
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory(prefix="onefold-choreography-") as directory:
        url = os.environ.get("ONEFOLD_URL") or f"sqlite:///{Path(directory) / 'shop.db'}"
        found = asyncio.run(play(url, console))
    table = Table("order", "state", "paid", "parcels", box=None, padding=(0, 2, 0, 0))
    for number, (state, paid, parcels) in found.items():
        table.add_row(str(number), state, f"{paid / 100:.2f} €", str(parcels))
    console.print(table)
    return 0 if found == EXPECTED else 1


if __name__ == "__main__":
    sys.exit(main())
