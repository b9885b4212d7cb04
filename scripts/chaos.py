#!/usr/bin/env python
"""Harm workers, senders and the store at random, then compare every row with what the accepted messages imply.

    .venv/bin/python scripts/chaos.py --store postgres --minutes 30 --seed 1
    .venv/bin/python scripts/chaos.py --store sqlite --minutes 30 --seed 1

On PostgreSQL backends are terminated and cancelled, the network is cut and loses answers, and the server is killed; on
SQLite another process holds the lock and the disk fails.  Workers and senders are killed, frozen and stopped on both.
The table at the end is for docs/soak.md.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys

from rich.console import Console
from rich.progress import Progress

from onefold.clock import system_random
from onefold.testing.chaos.run import Outcome, Settings, chaos_on_postgres, chaos_on_sqlite
from onefold.testing.servers import PostgresServer

#: The least number of events in a run of a minute; longer ones in proportion.
LEAST_PER_MINUTE = {"workers killed": 30}
LEAST_PER_MINUTE_ON_POSTGRES = {"backends terminated": 100}


async def run(settings: Settings, store: str, options: str, progress: Progress) -> Outcome:
    """Run chaos with a progress bar."""
    task = progress.add_task("starting", total=settings.seconds)

    def tell(phase: str, seconds: float) -> None:
        progress.update(task, description=phase, completed=seconds or settings.seconds)

    if store == "sqlite":
        return await chaos_on_sqlite(settings, options=options, progress=tell)
    with PostgresServer() as server:
        return await chaos_on_postgres(settings, server, server.create_database("chaos"), progress=tell)


def table(outcome: Outcome) -> str:
    """Return the figures in Markdown."""
    rows = [f"| {name} | {figure} |" for name, figure in outcome.figures().items()]
    return "\n".join([f"| | {outcome.store} |", "|---|---:|", *rows])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", choices=("sqlite", "postgres"), default="postgres")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=None, help="what is chosen; random unless given")
    parser.add_argument("--rate", type=float, default=150.0, help="messages sent a second")
    parser.add_argument("--pace", type=float, default=1.0, help="how often misfortune strikes, as a factor")
    parser.add_argument("--loop", choices=("asyncio", "uvloop"), default="uvloop")
    parser.add_argument("--options", default="", help="options of the SQLite URL, such as driver=sqlite3")
    parser.add_argument("--restarts", action=argparse.BooleanOptionalAction, default=True, help="kill PostgreSQL too")
    given = parser.parse_args()
    least = LEAST_PER_MINUTE | (LEAST_PER_MINUTE_ON_POSTGRES if given.store == "postgres" else {})
    settings = Settings(
        seed=system_random().randrange(1_000_000) if given.seed is None else given.seed,
        seconds=given.minutes * 60,
        rate=given.rate,
        pace=given.pace,
        loop=given.loop,
        restarts=given.restarts,
        least={name: round(number * given.minutes) for name, number in least.items()},
    )
    # On SIGTERM, end the run's processes and its server first, as on Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    console = Console(stderr=True)
    console.print(f"seed {settings.seed}")
    with Progress(console=console) as progress:
        outcome = asyncio.run(run(settings, given.store, given.options, progress))
    print(table(outcome))
    if outcome.failed:
        print(f"\nthe promise was broken:\n{outcome}", file=sys.stderr)
    return int(outcome.failed)


if __name__ == "__main__":
    sys.exit(main())
