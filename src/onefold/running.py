"""Entry: what an app offers for workflows and for effects that a person must look after."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, Concatenate, ParamSpec, TypeVar, Unpack, overload

from onefold import effects, inspection, limits
from onefold.chronicle import Chronicle
from onefold.codec import ResultCodec
from onefold.effects import LedgerEntry
from onefold.gate import GateOptions
from onefold.identity import KeySource
from onefold.inside import current
from onefold.inspection import make_act
from onefold.journal import signal_note
from onefold.options import DEFAULT_RETRY, TaskSettings
from onefold.registry import Registry
from onefold.retry import RetryPolicy
from onefold.step import Step
from onefold.stepping import StepOptions, declare
from onefold.store import State, Store
from onefold.transaction import refuse_inside
from onefold.workflow import Run, Workflow

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])

_any_value = ResultCodec(Any)


class WorkflowVerbs:
    """The part of ``App`` that is about workflows; see there."""

    _registry: Registry

    @property
    def store(self) -> Store:
        """The open store."""
        raise NotImplementedError

    def fresh_id(self) -> str:
        """Make an id that no other message or signal has."""
        raise NotImplementedError

    def dispatch(self, call: Any) -> Any:
        """Send one call."""
        raise NotImplementedError

    # declaring

    @overload
    def workflow(self, function: Callable[Concatenate[Run, P], Awaitable[R]], /) -> Workflow[P, R]: ...
    @overload
    def workflow(
        self,
        *,
        name: str | None = None,
        key: KeySource | None = None,
        subject: KeySource | None = None,
        fingerprint: tuple[str, ...] | None = None,
        queue: str = "default",
        version: int = 1,
        retry: RetryPolicy = DEFAULT_RETRY,
        timeout: timedelta | float | None = None,
        expires: timedelta | float | None = limits.MESSAGE_RETENTION,
        key_window: timedelta | float = limits.KEY_WINDOW,
        **gate: Unpack[GateOptions],
    ) -> DeclareWorkflow: ...
    def workflow(self, *function: Any, **settings: Any) -> Any:
        """Declare a workflow: ``async def onboard(run: Run, user_id: int) -> str``.

        A run is bound to the ``version`` it was started with.  Raise it when a change of the code would do other
        things than the journals of open runs say, and declare the old version beside the new one, under the same
        ``name``, until its last run is through; a worker takes only the versions it has.
        ``timeout`` limits each stretch of work between two waits, ``expires`` the time until the first wait.
        """
        declared = DeclareWorkflow(self, TaskSettings(**settings))
        return declared(*function) if function else declared

    @overload
    def step(self, function: F, /) -> F: ...
    @overload
    def step(self, **options: Unpack[StepOptions]) -> Callable[[F], F]: ...
    def step(self, *function: Any, **options: Unpack[StepOptions]) -> Any:
        """Say how a function is to be called by ``run.step``: under which name, for how long, how often.

        It stays the function it is.
        """
        return declare(*function) if function else lambda one: declare(one, **options)

    # telling

    async def signal(self, run_id: str, name: str, value: Any = None, *, id: str | None = None) -> bool:  # noqa: A002
        """Tell a run something; it goes on if it waits for that.

        True when the run has it: durable when this returns, or inside a handler or transaction when that commits.
        False when there is no such run any more.  Two signals with the same ``id`` are one.
        """
        if (inside := current.get()) is not None:
            inside.tell(run_id, name, value, id)
            return True
        note = signal_note(run_id, name, value, id or self.fresh_id())
        return bool(await self.store.record(run_id, [note.step]))

    # people

    async def journal(self, run_id: str) -> list[Step]:
        """Return what a run has done, in the order in which it was written down."""
        return await self.store.steps(run_id)

    async def chronicle(self, run_id: str, *, depth: int = limits.CHRONICLE_DEPTH) -> Chronicle | None:
        """Return a run, or any message, as people read it: a tree of what it did, waits for and is unsure of.

        Children are followed down to ``depth``.  None when there is no such message.  It changes nothing.
        """
        return await inspection.chronicle(self.store, run_id, depth=depth)

    async def ledger(self, message_id: str) -> list[LedgerEntry]:
        """Return the effects that a message's handler has begun with ``once``, and what is known of them."""
        return effects.entries(await self.store.steps(message_id))

    async def resolve(
        self, message_id: str, name: str, *, happened: bool, value: Any = None, actor: str, reason: str
    ) -> bool:
        """Say what became of an uncertain effect; the message, parked because of it, runs again.

        If it ``happened``, ``value`` is what its call would have returned; if not, the call is made again.
        True when this call settled it; False when it is not uncertain, or the message is running or has ended.
        A crash in the middle leaves the message as it was, or the effect resolved and the message scheduled.
        """
        refuse_inside("resolve()")
        told = _any_value.encode(value) if happened else None
        return await effects.resolve(self.store, message_id, name, told, make_act(actor, reason))

    async def resume(self, run_id: str, *, actor: str, reason: str) -> bool:
        """Let a parked message run now: after what a person had to do was done, or to look whether it can go on."""
        refuse_inside("resume()")
        act = make_act(actor, reason)
        async with self.store.transaction() as transaction:
            return bool(await transaction.move([run_id], State.SCHEDULED, act))

    async def restart(self, run_id: str, *, from_step: str, actor: str, reason: str) -> list[Step]:
        """Make a run go back: the named step and everything after it is done again.  Returns what was forgotten.

        Whoever runs it now can no longer commit.  A dead run is reopened; one that is done stays so.
        Effects of the forgotten steps are not undone, and what they sent is sent anew.
        """
        refuse_inside("restart()")
        limits.check_bytes("from_step", from_step, limits.STEP_NAME_BYTES_MAX)
        act = make_act(actor, reason)
        async with self.store.transaction() as transaction:
            if forgotten := await transaction.rewind(run_id, from_step, act):
                await transaction.move([run_id], State.SCHEDULED, act)
            return forgotten


class DeclareWorkflow:
    """The decorator ``app.workflow(…)`` returns."""

    def __init__(self, app: WorkflowVerbs, settings: TaskSettings) -> None:
        self._app = app
        self._settings = settings

    def __call__(self, function: Callable[Concatenate[Run, P], Awaitable[R]], /) -> Workflow[P, R]:
        workflow: Workflow[P, R] = Workflow(self._app, function, self._settings)
        self._app._registry.add(workflow)
        return workflow
