"""Entry: what an app offers for workflows and for effects that a person must look after."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, Unpack, overload

from onefold import effects, inspection, limits
from onefold.chronicle import Chronicle
from onefold.codec import ResultCodec
from onefold.context import Context
from onefold.effects import LedgerEntry
from onefold.envelope import refuse_reserved
from onefold.gate import GateOptions
from onefold.identity import KeySource
from onefold.inside import current
from onefold.inspection import make_act
from onefold.journal import signal_note
from onefold.options import TaskSettings
from onefold.registry import Registry
from onefold.restarting import restart
from onefold.retry import RetryPolicy
from onefold.saga import Saga
from onefold.status import SagaRecord, read_saga, stuck_undos
from onefold.step import Step, StepKind
from onefold.stepping import CallOptions, StepOptions, declare
from onefold.store import Act, Query, State, Store
from onefold.task import Task
from onefold.transaction import refuse_inside
from onefold.undo import Never
from onefold.workflow import Run, Workflow

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])

_any_value = ResultCodec(Any)


class WorkflowOptions(GateOptions, total=False):
    """What ``app.workflow(…)`` and ``app.saga(…)`` accept."""

    name: str | None
    key: KeySource | None
    subject: KeySource | None
    fingerprint: tuple[str, ...] | None
    queue: str
    version: int
    retry: RetryPolicy
    timeout: timedelta | float | None
    expires: timedelta | float | None
    key_window: timedelta | float


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
    def workflow(self, **settings: Unpack[WorkflowOptions]) -> DeclareWorkflow: ...
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
    def saga(self, function: Callable[Concatenate[Run, P], Awaitable[R]], /) -> Saga[P, R]: ...
    @overload
    def saga(self, **settings: Unpack[WorkflowOptions]) -> DeclareSaga: ...
    def saga(self, *function: Any, **settings: Any) -> Any:
        """Declare a saga: a workflow of which nothing is left when it fails.

        Every step in it says how it is undone, with ``@app.step(undo=…)`` or ``undo=never("reason")``.  When the saga
        fails for good, or is cancelled, every step that was begun is undone in reverse, also one of which nobody knows
        whether it took effect; then the saga is a dead letter with the reason ``compensated``.  When an undo gives up,
        the saga is stuck until a person resumes or resolves it.
        """
        declared = DeclareSaga(self, TaskSettings(**settings))
        return declared(*function) if function else declared

    @overload
    def step(self, function: F, /) -> F: ...
    @overload
    def step(self, *, undo: Task[P, Any], **options: Unpack[StepOptions]) -> DeclareStep[P]: ...
    @overload
    def step(self, *, undo: Never, **options: Unpack[StepOptions]) -> Callable[[F], F]: ...
    @overload
    def step(
        self, *, undo: Callable[Concatenate[Context, P], Awaitable[object]], **options: Unpack[StepOptions]
    ) -> DeclareStep[P]: ...
    @overload
    def step(self, *, undo: Callable[P, object], **options: Unpack[StepOptions]) -> DeclareStep[P]: ...
    @overload
    def step(self, **options: Unpack[StepOptions]) -> Callable[[F], F]: ...
    def step(self, *function: Any, **options: Any) -> Any:
        """Say how a function or task is to be called by ``run.step``: its name, how long, how often, how it is undone.

        It stays the function or task it is.  An ``undo`` is a function or task that takes the same arguments; it must
        cope with a step that did nothing, and with being called twice.
        """
        said: CallOptions = options  # type: ignore[assignment]
        return declare(function[0], said) if function else lambda one: declare(one, said)

    # telling

    async def signal(self, run_id: str, name: str, value: Any = None, *, id: str | None = None) -> bool:  # noqa: A002
        """Tell a run something; it goes on if it waits for that.

        True when the run has it: durable when this returns, or inside a handler or transaction when that commits.
        False when there is no such run any more.  Two signals with the same ``id`` are one.
        """
        if (inside := current.get()) is not None:
            inside.tell(run_id, name, value, id)
            return True
        note = signal_note(run_id, name, value, self.fresh_id() if id is None else refuse_reserved("id", id))
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
        The undo that a saga is stuck at is resolved in the same way, under its name such as ``undo:pay#1``: it
        happened, so the saga goes on with the next one, or it did not, so it is tried again.
        A crash in the middle leaves the message as it was, or the effect resolved and the message scheduled.
        """
        refuse_inside("resolve()")
        told = _any_value.encode(value) if happened else None
        if name in stuck_undos(await self.store.steps(message_id)):
            return await self._resolve_undo(message_id, name, told, make_act(actor, reason))
        return await effects.resolve(self.store, message_id, name, told, make_act(actor, reason))

    async def _resolve_undo(self, run_id: str, name: str, value: bytes | None, act: Act) -> bool:
        async with self.store.transaction() as transaction:
            if value is None:
                return bool(await transaction.move([run_id], State.SCHEDULED, act))
            return bool(await transaction.record(run_id, [Step(name, StepKind.RESULT, value)], act=act))

    async def saga_status(self, run_id: str) -> SagaRecord | None:
        """Return where a saga stands, with each of its steps; None if there is no such saga."""
        found = await self.store.find(Query(ids=(run_id,)))
        return read_saga(found[0], await self.store.steps(run_id)) if found and found[0].envelope.saga else None

    async def resume(self, run_id: str, *, actor: str, reason: str) -> bool:
        """Let a parked message run now: after what a person had to do was done, or to look whether it can go on."""
        refuse_inside("resume()")
        act = make_act(actor, reason)
        async with self.store.transaction() as transaction:
            return bool(await transaction.move([run_id], State.SCHEDULED, act))

    async def restart(self, run_id: str, *, from_step: str, actor: str, reason: str) -> list[Step]:
        """Make a run go back: the named step and everything after it is done again.  Returns what was forgotten.

        The worker that runs it now can no longer commit.  A dead run is reopened; one that is done stays so.
        Effects of the forgotten steps are not undone, and what they sent is sent anew.  Children and commands that were
        sent by them and have not ended are taken back in the same commit, unless they have keys of their own.
        A saga that is being undone, or was, goes forward again: from the first of the steps whose undo was begun, or
        from before it, because what was undone must be done anew.  A later step is refused with ``RestartError``, and
        so is any step while an undo is running, in a worker or as a command; then nothing was changed.
        """
        refuse_inside("restart()")
        limits.check_bytes("from_step", from_step, limits.STEP_NAME_BYTES_MAX)
        return await restart(self.store, run_id, from_step, make_act(actor, reason))


class DeclareWorkflow:
    """The decorator ``app.workflow(…)`` returns."""

    def __init__(self, app: WorkflowVerbs, settings: TaskSettings) -> None:
        self._app = app
        self._settings = settings

    def __call__(self, function: Callable[Concatenate[Run, P], Awaitable[R]], /) -> Workflow[P, R]:
        workflow: Workflow[P, R] = Workflow(self._app, function, self._settings)
        self._app._registry.add(workflow)
        return workflow


class DeclareSaga:
    """The decorator ``app.saga(…)`` returns."""

    def __init__(self, app: WorkflowVerbs, settings: TaskSettings) -> None:
        self._app = app
        self._settings = settings

    def __call__(self, function: Callable[Concatenate[Run, P], Awaitable[R]], /) -> Saga[P, R]:
        saga: Saga[P, R] = Saga(self._app, function, self._settings)
        self._app._registry.add(saga)
        return saga


class DeclareStep(Protocol[P]):
    """The decorator ``app.step(undo=…)`` returns: for what takes what its undo takes."""

    @overload
    def __call__(self, function: Task[P, R], /) -> Task[P, R]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[Concatenate[Context, P], Awaitable[R]], /
    ) -> Callable[Concatenate[Context, P], Awaitable[R]]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> Callable[P, R]: ...
