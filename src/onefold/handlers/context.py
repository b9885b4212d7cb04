"""Stage 7, handle: a handler's argument, with the message it runs for and the verbs whose effects commit with it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Any, ParamSpec, TypeVar

import msgspec

from onefold import limits
from onefold.clock import to_datetime, zone_of
from onefold.errors import HandlerError, LimitError, UncertainError
from onefold.handlers.effects import Ledger, Reconcile
from onefold.handlers.lease import Held
from onefold.handlers.progress import make_said
from onefold.message.codec import ResultCodec
from onefold.message.envelope import Envelope
from onefold.message.keys import upstream_key
from onefold.store import Lease, Said, Store, read_journal
from onefold.store.journal_lines import Line, LineKind
from onefold.transactions.buffer import Prepare
from onefold.transactions.handler_transaction import HandlerTransaction

P = ParamSpec("P")
R = TypeVar("R")


class Context(HandlerTransaction):
    """A handler's first argument: the message it runs for, and the only way to effects that commit with its outcome.

    Everything done through it commits together with the message's outcome when the handler returns, or not at all.
    """

    _checkpoints: Checkpoints | None = None

    def __init__(
        self,
        lease: Lease,
        store: Store,
        prepare: Prepare,
        resources: Any,
        held_until: Callable[[], int],
        step: StepScope | None = None,
        *,
        origin: str,
        unkeyed: int = 0,
        held: Held | None = None,
    ) -> None:
        # The body of ``HandlerTransaction.__init__``, copied: a context is made for every message, and the call costs.
        self.leases = (lease,)
        self.resources = resources
        self._store = store
        self._prepare = prepare
        self._unkeyed = unkeyed
        self.message = lease.envelope
        #: This run's number, counted from 1.
        self.attempt = lease.attempt if step is None else step.attempt
        #: Rises with every owner of the message; for outside stores that refuse a lower one.
        self.fence = lease.fence
        #: The name of the workflow step that this context is for; None for a task.
        self.step = None if step is None else step.name
        self._scope = step
        self._ledger = None if step is None else step.ledger
        self._held_until = held_until
        self._held = held
        self._origin = origin

    @property
    def idempotency_key(self) -> str:
        """The stable name of the work this message asks for."""
        return self.message.idempotency_key

    @property
    def scheduled_for(self) -> datetime | None:
        """The time this run was meant for, in its schedule's time zone; None when it was sent by hand."""
        occurrence = self.message.occurrence
        if occurrence is None:
            return None
        return to_datetime(occurrence.scheduled_for).astimezone(zone_of(occurrence.timezone))

    @property
    def missed(self) -> int:
        """How many earlier fire times had no run of their own; this run stands in for them."""
        return 0 if self.message.occurrence is None else self.message.occurrence.missed

    @property
    def deadline(self) -> datetime:
        """When the lease runs out unless it is renewed, which the worker does while it lives."""
        return to_datetime(self._held_until())

    def upstream_key(self, effect: str) -> str:
        """Return a key for an outside provider: the same on every retry and redrive of this work.

        No other work has it, in this database or in another one.
        """
        work = self.idempotency_key if self._scope is None else f"{self.idempotency_key}/{self._scope.work}"
        return upstream_key(self._origin, self.message.scope, work, effect)

    async def once(
        self,
        name: str,
        call: Callable[[], Awaitable[R]],
        *,
        reconcile: Reconcile[R] | None = None,
        provider_keeps_keys_for: timedelta | float | None = None,
    ) -> R:
        """Make a call to the outside whose effect must not happen twice, and return what it returned.

        The intent is recorded before, the outcome after, each with a commit of its own; a run that finds the outcome
        returns it without calling.  After a crash in between, or an exception from the call, it is uncertain whether
        the effect happened.  Then ``reconcile`` is called, which returns ``Happened(value)`` or ``NotHappened()``.
        Without it the call is repeated only while ``provider_keeps_keys_for`` has not passed since the first try,
        because for that long the provider recognises the call by its ``upstream_key``.  Otherwise the message is
        parked until a person tells with ``app.resolve`` whether it happened.
        A call that raises ``Retry``, ``Snooze`` or ``Reject`` declares that it had no effect.
        """
        self.refuse("once()")
        return await self.ledger.once(name, call, reconcile, provider_keeps_keys_for)

    def progress(self, percent: float, message: str = "") -> None:
        """Report how far the work is, from 0 to 100, to be read with ``app.progress``; counts as a beat.

        Costs next to nothing and commits nothing: the worker writes the latest report about once a second and when
        the handler is over, apart from the handler's own commit.  A crash loses the reports of the last second.
        """
        self.report(make_said(percent, message))

    def beat(self) -> None:
        """Report that the handler is moving, with no new percentage; see ``beat_within`` of a task."""
        self.report(Said())

    async def checkpoint(self, value: Any) -> None:
        """Record how far the work got; the next run of this message reads it with ``last_checkpoint``.

        Commits by itself, so call it before the handler's transaction begins.  Durable when it returns, and there for
        a retry, a redrive and a run after a crash; raises ``LeaseLostError`` if another worker has taken the message.
        ``value`` is anything that JSON can hold.
        """
        self.refuse("checkpoint()")
        self._refuse_late()
        await self._get_checkpoints().write(value)

    async def last_checkpoint(self) -> Any:
        """Return the value of the last checkpoint of this message, by any of its runs; None if there is none."""
        self.refuse("last_checkpoint()")
        return await self._get_checkpoints().last()

    def _get_checkpoints(self) -> Checkpoints:
        if self.step is not None:
            raise HandlerError("a step has no checkpoints; divide it into several steps, each of which is recorded")
        if self._checkpoints is None:
            self._checkpoints = Checkpoints(self.leases[0], self._store)
        return self._checkpoints

    def report(self, said: Said) -> None:
        """Leave a report for the worker; see ``progress`` and ``beat``."""
        if self._held is not None and not self.over:
            self._held.get_pulse().say(said)

    @property
    def ledger(self) -> Ledger:
        """The effects of this message or step; made at the first use."""
        if self._ledger is None:
            lease, store = self.leases[0], self._store
            self._ledger = Ledger(
                lease.id, lambda: read_journal(store, lease), lambda steps: store.record(lease, steps)
            )
        return self._ledger

    @property
    def uncertain(self) -> UncertainError | None:
        """The uncertain effect that a person must resolve before the message can go on; None if there is none."""
        return None if self._ledger is None else self._ledger.uncertain

    def after(self, function: Callable[P, Awaitable[object]], *args: P.args, **kwargs: P.kwargs) -> None:
        """Await ``function(…)`` after the commit, for work that may be missed: a cache to refresh, a page to ping.

        Best effort: it runs once at most, not at all if the handler fails or the process dies, and its errors are
        only logged.  A graceful stop waits for it.  For work that must happen, ``send`` a message.
        """
        if self.step is not None:
            raise HandlerError("a step has no after(); make the call a step of its own")
        super().after(function, *args, **kwargs)

    def _cause(self) -> Envelope:
        return self.message if self._scope is None else self._scope.cause(self.message)


class StepScope(msgspec.Struct, frozen=True):
    """The parts in which the context of a workflow's step differs from that of a task."""

    name: str
    attempt: int
    ledger: Ledger | None
    #: How often an operator restarted the run from an earlier line; messages the step sends then have new keys.
    restarts: int
    #: How often such a restart went back behind undos; an undone effect is made anew, so it needs a new upstream key.
    rounds: int = 0

    @property
    def work(self) -> str:
        """The step's name for upstream keys: with the number of its round, from the second one on."""
        return f"{self.name}~{self.rounds}" if self.rounds else self.name

    def cause(self, run: Envelope) -> Envelope:
        """Return the cause of the messages that this step sends; their ids and keys are derived from the step."""
        again = f"~{self.restarts}" if self.restarts else ""
        return msgspec.structs.replace(run, id=f"workflow:{run.id}{again}/{self.name}")


_PREFIX = "checkpoint#"
_value = ResultCodec(Any, most=limits.PAYLOAD_BYTES_MAX, field="checkpoint")


class Checkpoints:
    """The checkpoints of one claimed message."""

    def __init__(self, lease: Lease, store: Store) -> None:
        self._lease = lease
        self._store = store
        self._number: int | None = None
        self._last: bytes | None = None
        #: Checkpoints that are written concurrently get their numbers in the order of the calls: the last call counts.
        self._writing = asyncio.Lock()

    async def last(self) -> Any:
        """See ``Context.last_checkpoint``."""
        await self._load()
        return None if self._last is None else _value.decode(self._last)

    async def write(self, value: Any) -> None:
        """See ``Context.checkpoint``."""
        data = _value.encode(value)
        async with self._writing:
            number = await self._load() + 1
            if number > limits.CHECKPOINTS_MAX:
                raise LimitError(
                    "checkpoint",
                    f"message {self._lease.id} has {number - 1}; at most {limits.CHECKPOINTS_MAX} are kept: "
                    "write them less often, or divide the work among messages",
                )
            # Counted before the write: if the caller is cancelled, the line may be there all the same, and a second
            # line of that name would not be written.
            self._number = number
            await self._store.record(self._lease, [Line(f"{_PREFIX}{number}", LineKind.RESULT, data)])
            self._last = data

    async def _load(self) -> int:
        """Return the number of the last checkpoint; the journal is read once."""
        if self._number is None:
            lines = await read_journal(self._store, self._lease)
            found = {int(one.name.removeprefix(_PREFIX)): one.value for one in lines if one.name.startswith(_PREFIX)}
            if self._number is None:  # another call may have read it meanwhile, and written since
                self._number = max(found, default=0)
                self._last = found.get(self._number)
        return self._number
