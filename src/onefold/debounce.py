"""A use of the flow: many triggers in a short time become one message.

Each trigger writes the newest arguments and the new due time into an entry of the register; the first one also puts a
**carrier**, an ordinary message that is due then.  A carrier that comes too early is snoozed; one whose time has come
removes the entry and sends what it holds, in one commit.  The entry is compared and set, so a trigger either gets into
that message or begins anew: none is lost, and no message that was already sent is touched.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, Generic, ParamSpec

import msgspec
from msgspec.structs import asdict

from onefold import limits
from onefold.clock import MICROSECONDS, to_datetime
from onefold.context import Context
from onefold.envelope import derived_key
from onefold.errors import ConfigurationError, Snooze, StoreUnavailableError, seconds
from onefold.identity import KeySource, from_source
from onefold.store import Store
from onefold.task import Call, Task
from onefold.transaction import Prepare, refuse_inside

P = ParamSpec("P")

#: The kind of the entries in the register.
KIND = "debounce"
#: Attempts to write an entry that others write too; each is lost only to somebody who won.
_ROUNDS_MAX = 50
#: An entry that is overdue by this much has lost its carrier, for instance to a person who cancelled it.
_LOST_AFTER = 60 * MICROSECONDS


class Pending(msgspec.Struct, frozen=True):
    """What has been triggered and not yet sent."""

    first_at: int
    due_at: int
    payload: bytes
    fingerprint: bytes
    subject: str | None


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Pending).decode


class Debounced(Generic[P]):
    """A task that is sent once things have been quiet for a while, with the arguments of the last trigger."""

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
        #: Set once the carrier's task is declared, which needs this object.
        self.carrier: Task[[str], None] | None = None

    async def trigger(self, *args: P.args, **kwargs: P.kwargs) -> datetime:
        """Ask for a message and return when it is due, unless another trigger comes before.

        When it returns, the trigger is durable.  It commits by itself, apart from a handler it may be called in.
        """
        refuse_inside("trigger()")
        call = self.task.call(*args, **kwargs)
        key = self._key(asdict(self.task.signature.bind(args, kwargs)))
        name = limits.check_bytes("key", f"{self.task.name}:{key}", limits.KEY_BYTES_MAX)
        for _ in range(_ROUNDS_MAX):
            if (due_at := await self._write(name, call)) is not None:
                return to_datetime(due_at)
        raise StoreUnavailableError(f"{name!r} was triggered by others {_ROUNDS_MAX} times in a row; try again")

    async def _write(self, name: str, call: Call[Any]) -> int | None:
        """Write the trigger down; None when somebody else wrote meanwhile."""
        store = self._store()
        entry, now = await store.registered(KIND, name), await store.now()
        found = None if entry is None else _decode(entry.value)
        first_at = now if found is None else found.first_at
        due_at = max(min(now + self.wait, first_at + self.at_most), now)
        pending = Pending(first_at, due_at, call.payload, call.fingerprint, call.subject)
        async with store.transaction() as transaction:
            version = 0 if entry is None else entry.version
            if not await transaction.register(KIND, name, _encode(pending), version=version):
                return None
            if found is None or found.due_at + _LOST_AFTER < now:
                await transaction.put([self._carrier(name, pending, now)])
        return due_at

    def _carrier(self, name: str, pending: Pending, now: int) -> Any:
        if self.carrier is None:
            raise ConfigurationError(f"{self.task.name}: nothing carries its triggers; make it with app.debounce()")
        delay = (pending.due_at - now) / MICROSECONDS
        call = self.carrier.options(delay=delay, subject=name).call(name)
        key = derived_key("debounce", f"{name}@{to_datetime(now).isoformat()}")
        return self._prepare(msgspec.structs.replace(call, key=key), None, 0)[0]

    async def carry(self, ctx: Context, name: str) -> None:
        """Send what was triggered if its time has come; the handler of the carrier."""
        entry, now = await self._store().registered(KIND, name), await self._store().now()
        if entry is None:
            return  # another carrier was there
        pending = _decode(entry.value)
        if pending.due_at > now:
            raise Snooze(after=(pending.due_at - now) / MICROSECONDS, reason="triggered again")
        if not await ctx.register(KIND, name, None, version=entry.version):
            raise Snooze(after=0, reason="triggered again at this moment")
        place = self.task.gate.find(self.task.signature.decode(pending.payload), None)
        ctx.add(Call(self.task, pending.payload, pending.fingerprint, None, pending.subject, {}, place))
