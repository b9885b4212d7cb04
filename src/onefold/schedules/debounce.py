"""A use of the flow: many triggers in a short time become one message.

Each trigger writes the newest arguments and the new due time into an entry of the register; the first one also puts a
**carrier**, an ordinary message that is due then.  A carrier that runs too early is snoozed; one that runs in time
removes the entry and sends the message for it, in one commit.  The entry is written with a compare-and-set, so a
trigger either gets into that message or makes a new entry: none is lost, and no message that was sent is changed.

Triggers of one key that come while another is being written in the same process wait, and are then written together
with the arguments of the last.  When another process writes the same key, the write is tried again after a pause.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Generic, ParamSpec

import msgspec
from msgspec.structs import asdict

from onefold import limits
from onefold.clock import MICROSECONDS, SystemClock, system_random, to_datetime
from onefold.errors import ConfigurationError, Snooze, StoreUnavailableError, seconds
from onefold.handlers.context import Context
from onefold.message.envelope import Envelope, derived_key
from onefold.message.keys import KeySource, from_source
from onefold.store import Query, Store
from onefold.tasks.task import Call, Task
from onefold.transactions.app_transaction import refuse_inside
from onefold.transactions.buffer import Prepare

P = ParamSpec("P")

#: The kind of the entries in the register.
KIND = "debounce"
#: Attempts to write an entry; each fails only because another process has written it in between.
_ATTEMPTS_MAX = 50
#: The longest pause before the next attempt: it doubles from the first figure to the second.
_PAUSE_SECONDS, _PAUSE_SECONDS_MAX = 0.002, 0.2

_clock = SystemClock()
_chance = system_random()


class Pending(msgspec.Struct, frozen=True):
    """The entry of the register: the newest arguments, and when they are to be sent."""

    first_at: int
    due_at: int
    #: The message that will send it.
    carrier: str
    payload: bytes
    fingerprint: bytes
    subject: str | None


@dataclass(slots=True, eq=False)
class _Trigger:
    """One call of ``trigger`` that waits to be written."""

    call: Call[Any]
    due_at: int | None = None


@dataclass(slots=True)
class _Queue:
    """The triggers of one key in one event loop that wait to be written, and the lock for writing them."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    waiting: list[_Trigger] = field(default_factory=list)


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Pending).decode


class Debounced(Generic[P]):
    """A task that is sent when no trigger has come for a while, with the arguments of the last one."""

    def __init__(
        self,
        task: Task[P, Any],
        store: Callable[[], Store],
        prepare: Prepare,
        *,
        key: KeySource,
        wait: timedelta | float,
        at_most: timedelta | float,
    ) -> None:
        self.task = task
        shortest, longest = seconds(wait, "wait"), seconds(at_most, "at_most")
        limits.check_range("wait", shortest, limits.DEBOUNCE_SECONDS_MIN, limits.DAY)
        limits.check_range("at_most", longest, shortest, limits.DEBOUNCE_SECONDS_MAX)
        self.wait, self.at_most = round(shortest * MICROSECONDS), round(longest * MICROSECONDS)
        self._key = from_source(task.name, "key", key, task.signature.hints)
        self._store = store
        self._prepare = prepare
        #: By the event loop and the entry's name: a lock belongs to one event loop.
        self._queues: dict[tuple[asyncio.AbstractEventLoop, str], _Queue] = {}
        #: Set once the carrier's task is declared, which needs this object.
        self.carrier: Task[[str], None] | None = None

    async def trigger(self, *args: P.args, **kwargs: P.kwargs) -> datetime:
        """Trigger the message and return its due time, which another trigger may still move.

        When it returns, the trigger is durable.  It has its own commit, apart from that of a handler that calls it.
        """
        refuse_inside("trigger()")
        call = self.task.call(*args, **kwargs)
        key = self._key(asdict(self.task.signature.bind(args, kwargs)))
        name = limits.check_bytes("key", f"{self.task.name}:{key}", limits.KEY_BYTES_MAX)
        return to_datetime(await self._write_together(name, call))

    async def _write_together(self, name: str, call: Call[Any]) -> int:
        """Write the trigger: the call that gets the lock writes for all that wait for it."""
        place, mine = (asyncio.get_running_loop(), name), _Trigger(call)
        queue = self._queues.setdefault(place, _Queue())
        queue.waiting.append(mine)
        try:
            async with queue.lock:
                if mine.due_at is None:
                    together = list(queue.waiting)
                    due_at = await self._write_persistently(name, together[-1].call)
                    for one in together:
                        one.due_at = due_at
                        queue.waiting.remove(one)
                assert mine.due_at is not None
                return mine.due_at
        finally:
            # A caller that was cancelled, or whose write failed, must not have its trigger written by another one.
            if mine in queue.waiting:
                queue.waiting.remove(mine)
            if not queue.waiting and not queue.lock.locked():
                self._queues.pop(place, None)

    async def _write_persistently(self, name: str, call: Call[Any]) -> int:
        pause = _PAUSE_SECONDS
        for _ in range(_ATTEMPTS_MAX):
            if (due_at := await self._write(name, call)) is not None:
                return due_at
            await _clock.sleep(_chance.uniform(0, pause))
            pause = min(pause * 2, _PAUSE_SECONDS_MAX)
        raise StoreUnavailableError(
            f"{name!r} was triggered by other processes {_ATTEMPTS_MAX} times in a row; try again"
        )

    async def _write(self, name: str, call: Call[Any]) -> int | None:
        """Write the trigger and return when it is due; None when another process has written the entry meanwhile."""
        store = self._store()
        entry, now = await store.registered(KIND, name), await store.now()
        found = None if entry is None else _decode(entry.value)
        if found is not None and found.due_at <= now and await self._is_lost(found):
            # The carrier should have sent it by now and never will, so this trigger makes a new one, due at once.
            found, due_at, first_at = None, now, now
        else:
            first_at = now if found is None else found.first_at
            due_at = max(min(now + self.wait, first_at + self.at_most), now)
        carrier = self._carrier(name, due_at, now) if found is None else None
        carrier_id = found.carrier if found is not None else carrier.id if carrier is not None else ""
        pending = Pending(first_at, due_at, carrier_id, call.payload, call.fingerprint, call.subject)
        async with store.transaction() as transaction:
            version = 0 if entry is None else entry.version
            if not await transaction.register(KIND, name, _encode(pending), version=version):
                return None
            if carrier is not None:
                await transaction.put([carrier])
        return due_at

    async def _is_lost(self, pending: Pending) -> bool:
        """Whether the carrier of an entry has ended without sending it: it was cancelled or became a dead letter."""
        found = await self._store().find(Query(ids=(pending.carrier,)))
        return not found or found[0].state.ended

    def _carrier(self, name: str, due_at: int, now: int) -> Envelope:
        if self.carrier is None:
            raise ConfigurationError(f"{self.task.name}: Debounced has no carrier task; make it with app.debounce()")
        delay = (due_at - now) / MICROSECONDS
        call = self.carrier.options(delay=delay, subject=name).call(name)
        key = derived_key("debounce", f"{name}@{to_datetime(now).isoformat()}")
        return self._prepare(msgspec.structs.replace(call, key=key), None, 0)[0]

    async def carry(self, ctx: Context, name: str) -> None:
        """Send the message if it is due, or else snooze; the handler of the carrier."""
        entry, now = await self._store().registered(KIND, name), await self._store().now()
        if entry is None:
            return  # another carrier has sent it
        pending = _decode(entry.value)
        if pending.due_at > now:
            raise Snooze(after=(pending.due_at - now) / MICROSECONDS, reason="triggered again")
        if not await ctx.register(KIND, name, None, version=entry.version):
            raise Snooze(after=0, reason="triggered again at this moment")
        place = self.task.gate.find(self.task.signature.decode(pending.payload), None)
        ctx.add(Call(self.task, pending.payload, pending.fingerprint, None, pending.subject, {}, place))
