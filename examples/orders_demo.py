"""Charging orders, with everything going wrong: ``make demo``.

Two producers place 1,000 orders and, unsure whether it worked, send about 2,500 times.
Two worker processes charge them, and again and again one of them is killed with SIGKILL and replaced.
At the end each order must have been charged once: no more, no less.  The exit code says whether that held.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from multiprocessing.context import SpawnProcess
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from onefold import App, Context

ORDERS = 1_000
SENDS = 2_500
KILL_EVERY_SECONDS = 1.0
#: Leases are short, so that the messages of a killed worker are taken over while you watch.
LEASE_SECONDS = 1.0
GIVE_UP_SECONDS = 90.0

app = App()  # the store is named by ONEFOLD_URL, which main() sets for every process


@app.task(key="{order_id}:charge", subject="order:{order_id}")
async def charge(ctx: Context, order_id: int, cents: int) -> str:
    """Charge one order: a row of ours and a message to the next task, in one commit with "done"."""
    await asyncio.sleep(0.005)  # the slow part, such as asking for a price: nothing is locked yet
    await ctx.execute("INSERT INTO charge (order_id, cents, worker) VALUES (?, ?, ?)", order_id, cents, os.getpid())
    ctx.send(confirm, order_id)
    return "charged"


@app.task
async def confirm(ctx: Context, order_id: int) -> None:
    """Confirm one order; this message is stored only if the charge is."""
    await ctx.execute("INSERT INTO confirmation (order_id) VALUES (?)", order_id)


def produce(seed: int) -> None:
    """Place every order of this producer, and send some of them again, as an impatient client does."""
    chance = random.Random(seed)

    async def send_all() -> None:
        async with app:
            mine = list(range(seed, ORDERS, 2))
            sends = mine + chance.choices(mine, k=SENDS // 2 - len(mine))
            chance.shuffle(sends)
            for order_id in sends:
                receipt = await charge.send(order_id, cents=100 + order_id)
                async with app.transaction() as tx:
                    await tx.execute("INSERT INTO sending (duplicate) VALUES (?)", int(receipt.duplicate))

    asyncio.run(send_all())


def work() -> None:
    """Be a worker until killed or told to stop."""

    async def run() -> None:
        async with app:
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, app.stop_working)
            await app.work(lease=LEASE_SECONDS, concurrency=20)

    asyncio.run(run())


class Counts:
    """The store's counts at one moment."""

    def __init__(self) -> None:
        self.sent = self.suppressed = self.charged = self.confirmed = self.waiting = 0

    @classmethod
    async def read(cls) -> Counts:
        counts = cls()
        rows = await app.store.fetch(
            "SELECT (SELECT count(*) FROM sending), (SELECT coalesce(sum(duplicate), 0) FROM sending), "
            "(SELECT count(*) FROM charge), (SELECT count(*) FROM confirmation)"
        )
        counts.sent, counts.suppressed, counts.charged, counts.confirmed = rows[0]
        counts.waiting = sum(c.scheduled + c.leased for c in (await app.count()).values())
        return counts


def draw(counts: Counts, killed: int, elapsed: float) -> Table:
    table = Table(title=f"onefold demo, {elapsed:4.1f} s", title_justify="left", min_width=44)
    table.add_column("what")
    table.add_column("how many", justify="right")
    table.add_row("sends that returned", f"{counts.sent:,}")
    table.add_row("  of them suppressed as duplicates", f"{counts.suppressed:,}")
    table.add_row("workers killed with SIGKILL", f"[red]{killed}[/]")
    table.add_row("messages waiting or running", f"{counts.waiting:,}")
    table.add_row("effects: charges", f"[green]{counts.charged:,}[/] of {ORDERS:,}")
    table.add_row("effects: confirmations", f"[green]{counts.confirmed:,}[/] of {ORDERS:,}")
    return table


class Cast:
    """The processes of the demo."""

    def __init__(self) -> None:
        self._spawn = multiprocessing.get_context("spawn")
        self.producers = [self._start(produce, seed) for seed in range(2)]
        self.workers = [self._start(work) for _ in range(2)]
        self.killed = 0

    def _start(self, target: object, *args: int) -> SpawnProcess:
        process = self._spawn.Process(target=target, args=args, daemon=True)  # type: ignore[arg-type]
        process.start()
        return process

    def kill_one(self, chance: random.Random) -> None:
        """Kill one worker and start another in its place."""
        victim = chance.randrange(len(self.workers))
        self.workers[victim].kill()
        self.workers[victim].join()
        self.workers[victim] = self._start(work)
        self.killed += 1

    def leave(self) -> None:
        for process in (*self.producers, *self.workers):
            process.terminate()
            process.join(10)


async def play(console: Console) -> bool:
    chance = random.Random(7)
    async with app:
        async with app.transaction() as tx:
            await tx.execute(
                "CREATE TABLE charge (order_id INTEGER NOT NULL, cents INTEGER NOT NULL, worker INTEGER NOT NULL)"
            )
            await tx.execute("CREATE TABLE confirmation (order_id INTEGER NOT NULL)")
            await tx.execute("CREATE TABLE sending (duplicate INTEGER NOT NULL)")
        cast = Cast()
        started = last_kill = time.monotonic()
        try:
            with Live(console=console, refresh_per_second=8) as live:
                while True:
                    now = time.monotonic()
                    counts = await Counts.read()
                    live.update(draw(counts, cast.killed, now - started))
                    sending = any(producer.is_alive() for producer in cast.producers)
                    if (not sending and not counts.waiting) or now - started > GIVE_UP_SECONDS:
                        break
                    if now - last_kill >= KILL_EVERY_SECONDS:
                        cast.kill_one(chance)
                        last_kill = now
                    await asyncio.sleep(0.1)
        finally:
            cast.leave()
        return await verdict(console, cast.killed)


async def verdict(console: Console, killed: int) -> bool:
    """Count the effects of every order and say whether each happened once."""
    good = True
    console.print()
    for table in ("charge", "confirmation"):
        rows = await app.store.fetch(
            f"SELECT times, count(*) FROM (SELECT count(*) AS times FROM {table} GROUP BY order_id) GROUP BY times"
        )
        per_order = dict(rows)
        missing = ORDERS - sum(per_order.values())
        good = good and per_order == {1: ORDERS}
        told = ", ".join(f"{orders:,} orders took effect {times}×" for times, orders in sorted(per_order.items()))
        console.print(f"{table + 's:':15}{told}; {missing:,} missing")
    if good:
        console.print(
            f"[green]Every order took effect once, over {killed} killed workers and about {SENDS:,} sends.[/]"
        )
    else:
        console.print("[red]Some order did not take effect once: this is a defect, please report it.[/]")
    return good


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="onefold-demo-") as directory:
        os.environ["ONEFOLD_URL"] = f"sqlite:///{Path(directory) / 'shop.db'}"
        return 0 if asyncio.run(play(Console())) else 1


if __name__ == "__main__":
    sys.exit(main())
