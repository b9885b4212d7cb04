"""A worker with limits in a process of its own: ``limit_worker.py URL FOLDER LIMITS``, with the limits as JSON."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from onefold import App, Context, Rate

#: Short, because the places of a killed worker are free only when its leases have run out.
LEASE_SECONDS = 2.0
CONCURRENCY = 5
#: How long a handler takes; those with a cap long enough that several workers meet at it.
HOLD_SECONDS, CAPPED_HOLD_SECONDS = 0.02, 0.15


def make_app(url: str, folder: Path, *, cap: int, cap_each: int, rate: int, rate_each: int, burst: int) -> App:
    """Declare one task for each kind of limit; its handlers write down when they begin and end."""
    app, file = App(url), -1

    def note(*what: object) -> None:
        nonlocal file
        if file < 0:
            file = os.open(folder / f"{os.getpid()}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(file, f"{json.dumps([*what, time.monotonic()])}\n".encode())

    def declare(name: str, hold: float = HOLD_SECONDS, **limits: Any) -> None:
        async def handler(ctx: Context, key: str, number: int) -> None:
            note("began", name, key, number, ctx.fence)
            try:
                await asyncio.sleep(hold)
            finally:
                note("ended", name, key, number, ctx.fence)

        app.task(name=name, **limits)(handler)

    declare("capped", CAPPED_HOLD_SECONDS, max_running=cap)
    declare("each", CAPPED_HOLD_SECONDS, gate="{key}", max_running_each=cap_each)
    declare("rated", rate=Rate(rate, burst=burst))
    declare("rated_each", gate="{key}", rate_each=Rate(rate_each, burst=1))
    declare("line", ordering_key="{key}")
    declare("fair", fair_key="{key}")
    declare("level")
    return app


async def work(app: App) -> None:
    async with app:
        await app.work(lease=LEASE_SECONDS, concurrency=CONCURRENCY)


if __name__ == "__main__":
    url, folder, given = sys.argv[1:]
    made = make_app(url, Path(folder), **json.loads(given))
    # From here on its limits may decide what runs.
    (Path(folder) / f"{os.getpid()}.jsonl").touch()
    asyncio.run(work(made))
