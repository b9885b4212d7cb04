"""Accepted means durable: when ``send`` has returned, the message survives the death of its sender."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from onefold import App, ConfigurationError
from onefold.store import Query, State

if TYPE_CHECKING:
    from conftest import World

#: Sends, prints that it has, and is killed at once, without closing or flushing anything.
SENDER = """
import asyncio, os, signal, sys
from onefold import App

app = App(sys.argv[1])

@app.task(key="{number}")
async def ship(number: int) -> None: ...

async def main():
    await app.open()
    for number in range(20):
        await ship.send(number)
    sys.stdout.write("accepted\\n")
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


def test_a_message_survives_a_sender_killed_right_after_send_returned(store_url: str) -> None:
    app = App(store_url)
    asyncio.run(app.migrate())

    killed = subprocess.run([sys.executable, "-c", SENDER, store_url], capture_output=True, text=True, timeout=60)

    assert killed.stdout == "accepted\n", killed.stderr
    assert killed.returncode == -signal.SIGKILL

    async def look() -> None:
        async with app:
            found = await app.find(Query(message_type="ship"))
            assert {record.envelope.idempotency_key for record in found} == {str(number) for number in range(20)}
            assert len(found) == 20
            assert {record.state for record in found} == {State.SCHEDULED}

    asyncio.run(look())


def test_sending_again_after_the_sender_died_stores_nothing_new(store_url: str) -> None:
    app = App(store_url)

    @app.task(key="{number}")
    async def ship(number: int) -> None: ...

    asyncio.run(app.migrate())
    subprocess.run([sys.executable, "-c", SENDER, store_url], capture_output=True, timeout=60)

    async def send_again() -> None:
        async with app:
            receipts = [await ship.send(number) for number in range(20)]
            assert all(receipt.duplicate for receipt in receipts)
            assert (await app.count())["default"].scheduled == 20

    asyncio.run(send_again())


def test_a_send_that_raised_has_stored_nothing(world: World) -> None:
    app = world.app()

    @app.task(key="{number}")
    async def ship(number: int) -> None: ...

    async def scenario() -> None:
        async with world.running(app):
            with pytest.raises(TypeError):
                await ship.send()  # type: ignore[call-arg]
            with pytest.raises(ConfigurationError):
                await ship.options(delay=-1).send(1)
            assert await app.find(Query()) == []

    asyncio.run(scenario())
