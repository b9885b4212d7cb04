"""A sender of a chaos run: it records each request in its journal before the call, and the answer after it.

    python -m onefold.testing.chaos.sender ORDERS

The journal outlives the process.  The next process with the same slot first repeats every send with a key that was
neither accepted nor refused for certain, then continues with the next number.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from onefold.clock import SystemClock
from onefold.errors import StoreUnavailableError
from onefold.tasks.task import Call
from onefold.testing.chaos import demand
from onefold.testing.chaos.app import Tasks, make_tasks
from onefold.testing.chaos.demand import Demand
from onefold.testing.chaos.process import Orders, on_stop, open_log, opened, read_orders, run
from onefold.testing.checker import Journal

#: Concurrent senders in one process.
CLIENTS = 10
#: Relative frequency of each kind.
KINDS = {"deposit": 6, "purchase": 3, "gift": 2, "place": 3, "order": 4, "parcel": 1, "trip": 1}
#: How many messages one call of ``send_many`` sends.
MANY = 4
#: How often a message is sent together with others, is sent again though accepted, or is abandoned before the commit.
MANY_PART, AGAIN_PART, ABANDONED_PART = 0.15, 0.1, 0.1
#: Seconds before an unanswered send is repeated.
AGAIN_SECONDS = 0.1


class _Abandoned(Exception):  # noqa: N818 - a change of mind, not an error
    """Rolls back the sender's transaction on purpose."""


class Sender:
    """Sends messages drawn from its seed; repeats every send that has a key until it is accepted."""

    def __init__(self, tasks: Tasks, orders: Orders, journal: Journal) -> None:
        self.stopping = asyncio.Event()
        self._tasks = tasks
        self._orders = orders
        self._journal = journal
        self._chance = random.Random(orders.seed)
        self._clock = SystemClock()
        self._errors = open_log(orders.folder, f"{orders.name}.errors")
        self._lines: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        first = (orders.slot + 1) * demand.NUMBERS_PER_SENDER
        asked = [demand.read_key(entry.key) for entry in journal.entries if entry.event == "invoke"]
        self._next = max((one.number for one in asked), default=first) + 1
        #: The place of each number in its line; a new number gets the place behind all earlier ones.
        self._places: defaultdict[int, dict[int, int]] = defaultdict(dict)
        for line, numbers in demand.lines_of(set(asked)).items():
            self._places[line] = {number: place for place, number in enumerate(numbers, 1)}

    # open from a former process

    async def repeat_open(self) -> None:
        """Send again every message with a key that was neither accepted nor refused for certain."""
        answered = {entry.key for entry in self._journal.entries if entry.event in ("ok", "fail")}
        asked = dict.fromkeys(entry.key for entry in self._journal.entries if entry.event == "invoke")
        for one in sorted(demand.read_key(key) for key in asked if key not in answered):
            if one.kind not in demand.UNKEYED:
                await self.until_accepted(one)

    # new

    async def send(self) -> None:
        """Send until told to stop."""
        while not self.stopping.is_set():
            (kind,) = self._chance.choices(list(KINDS), list(KINDS.values()))
            await self._send_some(kind)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._chance.expovariate(self._orders.rate / CLIENTS)):
                    await self.stopping.wait()

    async def _send_some(self, kind: str) -> None:
        if kind == "place":
            await self._send_in_line()
        elif kind == "parcel" or (kind in ("deposit", "purchase") and self._chance.random() < MANY_PART):
            await self._send_many([self._demand(kind) for _ in range(MANY)])
        elif kind == "order" and self._chance.random() < ABANDONED_PART:
            await self._abandon(self._demand(kind))
        elif kind in demand.UNKEYED:
            await self._try(self._demand(kind))
        else:
            one = self._demand(kind)
            await self.until_accepted(one)
            if self._chance.random() < AGAIN_PART:
                await asyncio.gather(self.until_accepted(one), self.until_accepted(one))

    def _demand(self, kind: str) -> Demand:
        self._next += 1
        return Demand(kind, self._next - 1)

    async def _send_in_line(self) -> None:
        """Send one message of a line, and no other message of the line before this one is accepted."""
        line = demand.line_of(self._next)
        if self._lines[line].locked():
            return
        async with self._lines[line]:
            await self.until_accepted(self._demand("place"))

    async def until_accepted(self, one: Demand) -> None:
        """Send the message until it is accepted for certain."""
        while not await self._try(one):
            await self._clock.sleep(AGAIN_SECONDS)

    async def _try(self, one: Demand) -> bool:
        self._journal.invoke(self._orders.name, one.key)
        try:
            message_id = await (self._order(one) if one.kind == "order" else self._put(one))
        except Exception as error:
            self._not_answered(one, error)
            return False
        self._journal.ok(self._orders.name, one.key, message_id)
        return True

    def _not_answered(self, one: Demand, error: Exception) -> None:
        self._journal.unknown(self._orders.name, one.key)
        if not isinstance(error, StoreUnavailableError):
            kind = type(error)
            self._errors(f"{kind.__module__}.{kind.__name__}: {one.key}: {str(error)[:200]!r}\n".encode())

    async def _put(self, one: Demand) -> str:
        return (await self._tasks.app.dispatch(self._call(one))).id

    def _call(self, one: Demand) -> Call[int]:
        task = self._tasks.by_kind[one.kind]
        line = demand.line_of(one.number)
        if one.kind == "place" and demand.has_sequence(line):
            places = self._places[line]
            places.setdefault(one.number, len(places) + 1)
            return task.options(sequence=places[one.number]).call(one.number)
        return task.call(one.number)

    async def _order(self, one: Demand, *, abandon: bool = False) -> str:
        """Write rows and send in one commit; a row that an earlier attempt committed is not written again."""
        do, number = self._tasks.statements, one.number
        async with self._tasks.app.transaction() as transaction:
            if number % 3 == 0:
                price = do.price(number)
                await transaction.execute(price.statement, *price.parameters)
            order, till = do.order(number), do.till(number)
            if await transaction.execute(order.statement, *order.parameters):
                await transaction.execute(till.statement, *till.parameters)
            receipt = transaction.send(self._tasks.by_kind["order"], number)
            if abandon:
                raise _Abandoned
        return receipt.id

    async def _abandon(self, one: Demand) -> None:
        """Roll back before the commit on purpose: whatever faults occur, no row and no message may be left."""
        self._journal.invoke(self._orders.name, one.key)
        with suppress(Exception):
            await self._order(one, abandon=True)
        self._journal.fail(self._orders.name, one.key)

    async def _send_many(self, some: list[Demand]) -> None:
        """Send several messages in one call; without an answer, none of them is known to be accepted."""
        for one in some:
            self._journal.invoke(self._orders.name, one.key)
        try:
            receipts = await self._tasks.app.send_many([self._call(one) for one in some])
        except Exception as error:
            for one in some:
                self._not_answered(one, error)
            await asyncio.gather(*(self.until_accepted(one) for one in some))
            return
        for one, receipt in zip(some, receipts, strict=True):
            self._journal.ok(self._orders.name, one.key, receipt.id)


def read_journal(path: Path, write: Callable[[bytes], object] | None = None) -> Journal:
    """Return the journal that earlier processes kept; ``write`` receives only new entries."""
    former = Journal()
    if path.exists():
        text = path.read_bytes()
        former.read(text)
        # A killed process may have left half a line, which was not read; the next line must not be appended to it.
        os.truncate(path, text.rfind(b"\n") + 1)
    journal = Journal(write)
    journal.entries.extend(former.entries)
    return journal


async def send(orders: Orders) -> None:
    """Send until told to stop."""
    path = Path(orders.folder) / f"sender-{orders.slot}.journal"
    journal = read_journal(path, open_log(orders.folder, path.name))
    tasks = make_tasks(orders.url)
    sender = Sender(tasks, orders, journal)
    on_stop(sender.stopping.set)
    async with opened(tasks.app, orders):
        await sender.repeat_open()
        if not orders.only_repeat:
            await asyncio.gather(*(sender.send() for _ in range(CLIENTS)))


if __name__ == "__main__":
    given = read_orders()
    run(send(given), given.loop)
