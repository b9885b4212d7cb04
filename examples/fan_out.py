"""A fan-out over 1,000 items, with a progress bar: ``python examples/fan_out.py``.

One run sends a thousand children and is woken once, when the last of them has ended.  Every seventh child fails at
first, and a worker is stopped half-way: each picture is still made once, and the run has all results in order.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from onefold import App, Context, RetryPolicy, Run

PICTURES = 1_000
LOOK_SECONDS = 0.05

app = App()  # the store is named by ONEFOLD_URL


@app.task(retry=RetryPolicy(max_attempts=3, base=0.1))
async def shrink(ctx: Context, picture: int) -> int:
    """Make one small picture: a row, in one commit with "done"."""
    if picture % 7 == 0 and ctx.attempt == 1:
        raise ConnectionError("the disk was away for a moment")
    # Both stores run this; for parameters each driver has its own placeholders.
    await ctx.execute(f"INSERT INTO small_picture (number) VALUES ({picture:d})")
    return picture * 10


@app.workflow(key="{album}")
async def make_album(run: Run, album: str, pictures: int) -> str:
    sizes = await run.gather(*(run.child(shrink, number) for number in range(pictures)))
    return f"{album}: {len(sizes)} pictures, {sum(sizes):,} bytes"


async def play(console: Console, pictures: int = PICTURES) -> str:
    """Make an album and return the result of its run; raise if a picture was made twice, or not at all."""
    await app.migrate()
    async with app:
        async with app.transaction() as tx:
            await tx.execute("CREATE TABLE small_picture (number INTEGER NOT NULL)")
        receipt = await make_album.send("summer", pictures)
        workers = [asyncio.create_task(app.work(name=f"worker-{n}", concurrency=20)) for n in range(2)]
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console) as progress:
            bar = progress.add_task("pictures", total=pictures)
            made, stopped = 0, False
            while made < pictures:
                made = (await app.store.fetch("SELECT count(*) FROM small_picture"))[0][0]
                progress.update(bar, completed=made)
                if made > pictures // 2 and not stopped:
                    stopped = workers[0].cancel()
                await asyncio.sleep(LOOK_SECONDS)
        told = await receipt.result(timeout=60)
        app.stop_working()
        await asyncio.gather(*workers, return_exceptions=True)
        rows = await app.store.fetch("SELECT count(*), count(DISTINCT number) FROM small_picture")
        assert rows == [(pictures, pictures)], rows
        return told


def main() -> int:
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory(prefix="onefold-album-") as directory:
        os.environ.setdefault("ONEFOLD_URL", f"sqlite:///{Path(directory) / 'album.db'}")
        told = asyncio.run(play(console))
    console.print(f"[green]{told}[/]; one worker was stopped half-way, every seventh picture failed at first.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
