"""One row that the store cannot process, among others that are fine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import apsw
import psycopg

from onefold import App, Query, State
from onefold.message.envelope import Envelope
from onefold.tasks.options import SendOptions
from onefold.testing.transport import MemoryTransport

#: The other messages are done within this time, however long the bad row is looked at.
DONE_SECONDS_MAX = 15.0
#: Long enough to send a few messages and to change their rows before they are due.
DUE_SECONDS = 0.3
#: The largest number that both engines can store.
LARGEST = 2**63 - 1


class Shop:
    """An app with a plain task, one with sequence numbers and one with a limit."""

    def __init__(self, url: str, *, receives: bool = False) -> None:
        self.url = url
        self.app = App(url)
        self.ran: list[tuple[str, int]] = []
        self.transport = MemoryTransport()
        if receives:
            self.app.receive(self.transport, "in", types=["plain"])

        @self.app.task
        async def plain(number: int) -> None:
            self.ran.append(("plain", number))

        @self.app.task(ordering_key="{line}", gap="skip")
        async def lined(line: str, number: int) -> None:
            self.ran.append((line, number))

        @self.app.task(max_running=5)
        async def limited(number: int) -> None:
            self.ran.append(("limited", number))

        self.plain, self.lined, self.limited = plain, lined, limited

    def write(self, statement: str, *parameters: Any) -> None:
        """Change rows without the store; the tables have the same names on both engines but for a prefix."""
        if self.url.startswith("sqlite"):
            connection = apsw.Connection(self.url.removeprefix("sqlite:///"))
            connection.execute(statement.replace("onefold.", "onefold_").replace("%s", "?"), parameters)
            connection.close()
        else:
            with psycopg.connect(self.url, autocommit=True) as direct:
                direct.execute(statement, parameters)  # type: ignore[arg-type]

    def overtax(self, message_id: str) -> None:
        """Set the fence so high that the next claim of this message overflows it."""
        self.write(f"UPDATE onefold.delivery SET fence = {LARGEST} WHERE {self.names('delivery', message_id)}")

    def garble(self, message_id: str) -> None:
        """Write headers into the message's row that are not JSON."""
        self.write("UPDATE onefold.message SET headers = %s WHERE id = %s", b"{'", message_id)

    def names(self, table: str, message_id: str) -> str:
        """Return the SQL condition that selects a message's rows of a table."""
        if self.url.startswith("sqlite"):
            return f"seq = (SELECT seq FROM onefold_message WHERE id = '{message_id}')"
        return f"{'message_id' if table == 'attempt' else 'id'} = '{message_id}'"

    async def work_until(self, true: Callable[[], Awaitable[bool]]) -> None:
        """Work until the condition is true; a worker that ends before that is an error."""
        working = asyncio.create_task(self.app.work(lease=2.0))
        try:
            async with asyncio.timeout(DONE_SECONDS_MAX):
                while not await true():
                    assert not working.done(), f"the worker ended: {working.exception()!r}"
                    await asyncio.sleep(0.02)
        finally:
            self.app.stop_working()
            await asyncio.wait([working], timeout=5)

    async def have_run(self, *numbers: int, name: str = "plain") -> bool:
        return {(name, number) for number in numbers} <= set(self.ran)

    async def state(self, message_id: str) -> State:
        (record,) = await self.app.find(Query(ids=(message_id,)))
        return record.state


def wire(id_: str, **fields: Any) -> Envelope:
    """Return an envelope as a foreign program would publish it."""
    given: dict[str, Any] = {
        "id": id_,
        "message_type": "plain",
        "queue": "in",
        "idempotency_key": id_,
        "correlation_id": "c",
        "causation_id": "c",
        "subject": "s",
        "payload_inline": b'{"number":1}',
    }
    return Envelope(**{**given, **fields})


async def a_number_at_the_limit_stops_no_worker(url: str) -> None:
    """The largest sequence number of a line has ended; the line continues with a small one, as older versions did."""
    shop = Shop(url)
    await shop.app.migrate()
    async with shop.app:
        receipt = await shop.lined.options(sequence=5).send("a", 1)
        await shop.work_until(lambda: shop.have_run(1, name="a"))
        shop.write(f"UPDATE onefold.gate SET last = {LARGEST}")
        await shop.lined.options(sequence=6).send("a", 2)
        await shop.lined.send("b", 3)
        await shop.plain.send(4)
        await shop.limited.send(5)

        async def all_have_run() -> bool:
            return {("plain", 4), ("a", 2), ("b", 3), ("limited", 5)} <= set(shop.ran)

        await shop.work_until(all_have_run)
        assert await shop.state(receipt.id) is State.DONE


async def a_bad_row_ends_alone(url: str, spoil: Callable[[Shop, str], None]) -> None:
    """Of several due messages one of each kind is spoiled: it becomes a dead letter, and the others are done."""
    shop = Shop(url)
    await shop.app.migrate()
    async with shop.app:
        # Due together, after all of them were sent, with the bad ones first.
        first: SendOptions = {"delay": DUE_SECONDS}
        then: SendOptions = {"delay": DUE_SECONDS + 0.01}
        bad = [
            await shop.plain.options(**first).send(0),
            await shop.lined.options(**first).send("bad", 0),
            await shop.limited.options(**first).send(0),
        ]
        for number in range(1, 6):
            await shop.plain.options(**then).send(number)
            await shop.lined.options(**then).send("good", number)
            await shop.limited.options(**then).send(number)
        for receipt in bad:
            spoil(shop, receipt.id)
        await asyncio.sleep(DUE_SECONDS)
        others = {(name, number) for name in ("plain", "good", "limited") for number in range(1, 6)}

        async def all_over() -> bool:
            return others <= set(shop.ran) and {await shop.state(one.id) for one in bad} == {State.DEAD}

        await shop.work_until(all_over)
        letters = [letter async for letter in shop.app.dead_letters()]
        assert {letter.failure.reason for letter in letters} == {"damaged"}, letters
