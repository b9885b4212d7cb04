"""Stage 7, handle: what a handler receives, the message it runs for and the only door for its effects."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Any, ParamSpec, TypeVar

import msgspec

from onefold.checkpoint import Checkpoints
from onefold.clock import to_datetime
from onefold.effects import Ledger, Reconcile
from onefold.envelope import Envelope
from onefold.errors import HandlerError, UncertainError
from onefold.identity import upstream_key
from onefold.journal import read_journal
from onefold.progress import Bearer, make_said, pulse_of
from onefold.store import Lease, Said, Store
from onefold.timetable import zone_of
from onefold.transaction import Prepare
from onefold.work import Work

P = ParamSpec("P")
R = TypeVar("R")


class Context(Work):
    """What a handler receives: the message it runs for, and the only door for its effects.

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
        bearer: Bearer | None = None,
    ) -> None:
        # As ``Work`` does it, without the call: one of these is made for every message.
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
        #: The name of the step of a workflow that this is; None for a task.
        self.step = None if step is None else step.name
        self._scope = step
        self._ledger = None if step is None else step.ledger
        self._held_until = held_until
        self._bearer = bearer
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
        """How many earlier fire times had no run of their own, so that this one stands in for them."""
        return 0 if self.message.occurrence is None else self.message.occurrence.missed

    @property
    def deadline(self) -> datetime:
        """When the lease runs out unless it is renewed; renewed by itself while the worker lives."""
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
        returns it without calling.  After a crash in between, or an exception from the call, whether the effect
        happened is uncertain.  Then ``reconcile`` is asked, which answers ``Happened(value)`` or ``NotHappened()``.
        Without it the call is made again only while ``provider_keeps_keys_for`` has not passed since the first one:
        so long the provider knows the call by ``upstream_key``.  Otherwise the message is parked until a person says
        what happened, with ``app.resolve``.
        A call that raises ``Retry``, ``Snooze`` or ``Reject`` says that it did nothing.
        """
        self.refuse("once()")
        return await self._effects().once(name, call, reconcile, provider_keeps_keys_for)

    def progress(self, percent: float, message: str = "") -> None:
        """Say how far the work is, from 0 to 100, for whoever asks with ``app.progress``; counts as a beat.

        Costs next to nothing and commits nothing: the worker writes the last word about once a second and when the
        handler is over, apart from the handler's own commit.  A crash loses what was said within the last second.
        """
        self._say(make_said(percent, message))

    def beat(self) -> None:
        """Say that the handler is moving, though there is nothing new to tell; see ``beat_within`` of a task."""
        self._say(Said())

    async def checkpoint(self, value: Any) -> None:
        """Write down where the work got to; the next run of this message finds it with ``last_checkpoint``.

        Commits by itself, so it goes before the handler's transaction.  Durable when it returns, and given to a retry,
        a redrive and whoever takes over after a crash; raises ``LeaseLostError`` if somebody has.
        ``value`` is anything that JSON can hold.
        """
        self.refuse("checkpoint()")
        self._refuse_late()
        await self._so_far().write(value)

    async def last_checkpoint(self) -> Any:
        """Return the value of the last checkpoint of this message, by any of its runs; None if there is none."""
        self.refuse("last_checkpoint()")
        return await self._so_far().last()

    def _so_far(self) -> Checkpoints:
        if self.step is not None:
            raise HandlerError("a step has no checkpoints, it is one; divide it into several")
        if self._checkpoints is None:
            self._checkpoints = Checkpoints(self.leases[0], self._store)
        return self._checkpoints

    def _say(self, said: Said) -> None:
        if self._bearer is not None and not self.over:
            pulse_of(self._bearer).say(said)

    def _effects(self) -> Ledger:
        if self._ledger is None:
            lease, store = self.leases[0], self._store
            self._ledger = Ledger(
                lease.id, lambda: read_journal(store, lease), lambda steps: store.record(lease, steps)
            )
        return self._ledger

    @property
    def uncertain(self) -> UncertainError | None:
        """Why a person is needed before this can go on, if one is."""
        return None if self._ledger is None else self._ledger.uncertain

    def after(self, function: Callable[P, Awaitable[object]], *args: P.args, **kwargs: P.kwargs) -> None:
        """Await ``function(…)`` after the commit, for what may also be missed: a cache to refresh, a page to ping.

        Best effort: it runs once at most, not at all if the handler fails or the process dies, and its errors are
        only logged.  A graceful stop waits for it.  What must happen is a message of its own: use ``send``.
        """
        if self.step is not None:
            raise HandlerError("a step has nothing after its commit; make it a step of its own")
        super().after(function, *args, **kwargs)

    def _cause(self) -> Envelope:
        return self.message if self._scope is None else self._scope.cause(self.message)


class StepScope(msgspec.Struct, frozen=True):
    """What makes the context of a workflow's step different from that of a task."""

    name: str
    attempt: int
    ledger: Ledger | None
    #: How often a person made the run go back; what it sends then is new.
    restarts: int
    #: How often it went back behind undos; what was undone is done anew, also at providers that know our keys.
    rounds: int = 0

    @property
    def work(self) -> str:
        """What the step is, among all that the run does at outside providers."""
        return f"{self.name}~{self.rounds}" if self.rounds else self.name

    def cause(self, run: Envelope) -> Envelope:
        """Return whom the messages of this step go back to: they are named after it, and keyed by its name."""
        again = f"~{self.restarts}" if self.restarts else ""
        return msgspec.structs.replace(run, id=f"workflow:{run.id}{again}/{self.name}")
