"""The message of a dead worker is run by another one soon after its lease, even under load."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import time

import pytest

from onefold import App

pytestmark = pytest.mark.alone

LEASE = 1.0
#: A takeover comes at most this long after the end of the dead worker's lease.
LATE_SECONDS_MAX = 2.0
#: How long every other handler blocks the event loop; longer than any pause of the store itself.
BLOCK_SECONDS = 0.6
#: More messages than can be handled while the test lasts.
BACKLOG = 200

VICTIM = """
import asyncio, sys
from onefold import App
app = App(sys.argv[1])

@app.task(name="held")
async def held() -> None:
    print("held", flush=True)
    await asyncio.sleep(1_000)

async def main():
    async with app:
        await app.work(lease=float(sys.argv[2]))

asyncio.run(main())
"""


def kill_a_worker_with(url: str) -> float:
    """Start a worker process, kill it while it handles a message, and return the time of its death."""
    with subprocess.Popen([sys.executable, "-c", VICTIM, url, str(LEASE)], stdout=subprocess.PIPE) as victim:
        assert victim.stdout is not None
        assert victim.stdout.readline() == b"held\n"
        victim.send_signal(signal.SIGKILL)
        victim.wait()
        return time.monotonic()


def takeover_seconds(url: str, concurrency: int, backlog: int) -> float:
    """Return how long after a worker's death its message is run by another worker that has a backlog of its own."""
    app = App(url)
    ran: list[float] = []
    taken = asyncio.Event()

    @app.task
    async def held() -> None:
        ran.append(time.monotonic())
        taken.set()

    @app.task
    async def busy(number: int) -> None:
        if number % 2:
            time.sleep(BLOCK_SECONDS)  # noqa: ASYNC251 (blocking the event loop is what is tested)

    async def scenario() -> float:
        await app.migrate()
        async with app:
            await held.send()
            died = await asyncio.to_thread(kill_a_worker_with, url)
            await app.send_many(busy.call(number) for number in range(backlog))
            working = asyncio.create_task(app.work(lease=LEASE, concurrency=concurrency, stop_after=1.0))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LEASE + 3 * LATE_SECONDS_MAX):
                    await taken.wait()
            app.stop_working()
            await working
            return (ran[0] if ran else float("inf")) - died

    return asyncio.run(scenario())


@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_worker_whose_handlers_block_takes_over_in_time(store_url: str, concurrency: int) -> None:
    """Every second handler blocks the event loop for 0.6 s and the backlog never ends; the takeover is not late."""
    assert takeover_seconds(store_url, concurrency, BACKLOG) < LEASE + LATE_SECONDS_MAX


def test_an_idle_worker_takes_over_in_time(store_url: str) -> None:
    """A worker without other work looks for expired leases soon enough."""
    assert takeover_seconds(store_url, 1, 0) < LEASE + LATE_SECONDS_MAX
