"""Entry: the verbs of an app for workflows, sagas and signals, and for effects whose outcome is uncertain."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, Unpack, overload

from onefold import limits
from onefold.app.base import AppBase
from onefold.current import current
from onefold.errors import KeyReuseError, SignalError
from onefold.handlers import effects
from onefold.handlers.context import Context
from onefold.handlers.effects import LedgerEntry
from onefold.message.codec import ResultCodec
from onefold.message.envelope import refuse_reserved
from onefold.message.keys import KeySource
from onefold.operations.acts import make_act
from onefold.operations.history import Chronicle
from onefold.operations.history_builder import chronicle
from onefold.store import Act, PutOptions, Query, State
from onefold.store.journal_lines import Line, LineKind, signal_note
from onefold.tasks.gates import GateOptions
from onefold.tasks.options import TaskSettings, task_settings
from onefold.tasks.receipt import Receipt
from onefold.tasks.retry import RetryPolicy
from onefold.tasks.task import Call, Task
from onefold.transactions.app_transaction import refuse_inside
from onefold.transactions.buffer import refuse_task
from onefold.workflows.journal import open_signals
from onefold.workflows.restart import restart
from onefold.workflows.saga import Saga, stuck_undos
from onefold.workflows.saga_status import SagaRecord, read_saga
from onefold.workflows.steps import CallOptions, Never, StepOptions, declare
from onefold.workflows.workflow import Run, Workflow

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])

_any_value = ResultCodec(Any)


class WorkflowOptions(GateOptions, total=False):
    """The options of ``app.workflow(…)`` and ``app.saga(…)``."""

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
    max_steps: int | None


class WorkflowVerbs(AppBase):
    """The part of ``App`` that is about workflows; see there."""

    # declaring

    @overload
    def workflow(self, function: Callable[Concatenate[Run, P], Awaitable[R]], /) -> Workflow[P, R]: ...
    @overload
    def workflow(self, **settings: Unpack[WorkflowOptions]) -> DeclareWorkflow: ...
    def workflow(self, *function: Any, **settings: Any) -> Any:
        """Declare a workflow: ``async def onboard(run: Run, user_id: int) -> str``.

        A run keeps the ``version`` it was started with.  Raise it when the changed code would take other steps than
        the journals of open runs hold, and declare the old version beside the new one, under the same ``name``, until
        its last run has ended; a worker takes only the versions it has.
        ``timeout`` limits the time between two waits, ``expires`` the time until the first wait, and ``max_steps`` the
        steps of a run before it is parked for an operator.
        """
        declared = DeclareWorkflow(self, task_settings(settings))
        return declared(*function) if function else declared

    @overload
    def saga(self, function: Callable[Concatenate[Run, P], Awaitable[R]], /) -> Saga[P, R]: ...
    @overload
    def saga(self, **settings: Unpack[WorkflowOptions]) -> DeclareSaga: ...
    def saga(self, *function: Any, **settings: Any) -> Any:
        """Declare a saga: a workflow whose steps are undone when it fails.

        Each of its steps declares its undo, with ``@app.step(undo=…)`` or ``undo=never("reason")``.  When the saga
        fails for good, or is cancelled, every step that was begun is undone in reverse order, even if it is unknown
        whether the step took effect; then the saga is a dead letter with the reason ``compensated``.  When an undo
        fails for good, the saga is stuck until an operator resumes or resolves it.
        """
        declared = DeclareSaga(self, task_settings(settings))
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
        """Declare how ``run.step`` calls a function or task: its name, timeout, retries and undo.

        The function or task itself is returned.  An ``undo`` is a function or task with the same arguments; it must be
        safe after a step that did nothing, and when it is called twice.
        """
        given: CallOptions = options  # type: ignore[assignment]
        return declare(function[0], given) if function else lambda one: declare(one, given)

    # signals

    async def signal(self, run_id: str, name: str, value: Any = None, *, id: str | None = None) -> bool:  # noqa: A002
        """Send a run a signal; the run continues if it waits for it.

        True when the run has the signal: it is durable when this returns, or inside a handler or transaction when that
        commits.  False when the run has ended; inside a handler or transaction that is known only at its commit, so
        True is returned and the signal is dropped.  Two signals with the same ``id`` are one.
        Raises ``SignalError`` when the store has no message of this id; inside a handler or transaction the commit
        fails with it, and the handler's message becomes a dead letter with the reason ``no such run``.
        """
        if (inside := current.get()) is not None:
            inside.add_signal(run_id, name, value, id)
            return True
        note = signal_note(run_id, name, value, self.fresh_id() if id is None else refuse_reserved("id", id))
        return bool(await self.store.record(run_id, [note.step]))

    async def signal_with_start(
        self,
        call: Call[R],
        name: str,
        value: Any = None,
        *,
        id: str | None = None,  # noqa: A002
    ) -> Receipt[R]:
        """Start a run unless one has its key already, and send it a signal, in one commit.

        ``await app.signal_with_start(onboard.call(7), "confirmed", True)``: if the key of the call is free the run is
        started with the signal in its mailbox, otherwise the run that holds the key gets the signal, and
        ``receipt.duplicate`` is true.  Two signals with the same ``id`` are one.
        Durable when it returns; inside a handler, transaction or workflow it is part of that commit.
        Raises ``SignalError`` when the run that holds the key has ended with a result or was cancelled, and
        ``KeyReuseError`` when it was started with other arguments; then nothing was written.
        """
        if (inside := current.get()) is not None:
            joined: Receipt[R] = inside.add_start(call, name, value, id)
            return joined
        refuse_task(call)
        envelope, receipt = self.prepare(call, None, 0)
        id_ = self.fresh_id() if id is None else refuse_reserved("id", id)
        note = signal_note(envelope.id, name, value, id_)
        if_dead = call.options.get("if_dead", "keep")
        async with self.store.transaction() as transaction:
            (stored,) = await transaction.put([envelope], PutOptions(if_dead=if_dead))
            if stored.clash:
                raise KeyReuseError(envelope.message_type, envelope.idempotency_key, stored.id)
            if not await transaction.record(stored.id, [note.step]):
                raise SignalError.ended(stored.id, name)
        receipt.confirm(stored)
        return receipt

    # operators

    async def journal(self, run_id: str) -> list[Line]:
        """Return the journal of a run: what it has done, in the order in which it was recorded."""
        return await self.store.steps(run_id)

    async def chronicle(self, run_id: str, *, depth: int = limits.CHRONICLE_DEPTH) -> Chronicle | None:
        """Return a run, or any message, as a tree for people: its steps, its waits and its uncertain effects.

        Children are included down to ``depth``.  None when there is no such message.  It changes nothing.
        """
        return await chronicle(self.store, run_id, depth=depth)

    async def ledger(self, message_id: str) -> list[LedgerEntry]:
        """Return the effects that a message's handler has begun with ``once``, and the outcome of each if known."""
        return effects.entries(await self.store.steps(message_id))

    async def resolve(
        self, message_id: str, name: str, *, happened: bool, value: Any = None, actor: str, reason: str
    ) -> bool:
        """Record whether an uncertain effect happened; the message, which is parked because of it, runs again.

        If it ``happened``, ``value`` is what its call would have returned; if not, the call is made again.
        True when this call resolved it; False when it is not uncertain, or the message is running or has ended.
        The undo at which a saga is stuck is resolved in the same way, under its name such as ``undo:pay#1``: if it
        happened the saga goes on with the next undo, if not this one is tried again.
        A crash in the middle leaves the message as it was, or the effect resolved and the message scheduled.
        """
        refuse_inside("resolve()")
        outcome = _any_value.encode(value) if happened else None
        if name in stuck_undos(await self.store.steps(message_id)):
            return await self._resolve_undo(message_id, name, outcome, make_act(actor, reason))
        return await effects.resolve(self.store, message_id, name, outcome, make_act(actor, reason))

    async def _resolve_undo(self, run_id: str, name: str, value: bytes | None, act: Act) -> bool:
        async with self.store.transaction() as transaction:
            if value is None:
                return bool(await transaction.move([run_id], State.SCHEDULED, act))
            return bool(await transaction.record(run_id, [Line(name, LineKind.RESULT, value)], act=act))

    async def drop_signal(self, run_id: str, name: str, id: str, *, actor: str, reason: str) -> bool:  # noqa: A002
        """Remove a signal from a run's mailbox, for instance one of the wrong type; the run reads what is left.

        True when this call removed it.  False when there is no such signal, when a wait has received it already, or
        when the run is running or has ended; ``restart`` from that wait gives a received signal back.
        """
        refuse_inside("drop_signal()")
        line = signal_note(run_id, name, None, id).step
        return await self._answer_signal(run_id, line, LineKind.VOID, make_act(actor, reason))

    async def replace_signal(
        self,
        run_id: str,
        name: str,
        id: str,  # noqa: A002
        value: Any,
        *,
        actor: str,
        reason: str,
    ) -> bool:
        """Change the value of a signal in a run's mailbox; it keeps its place.  See ``drop_signal``.

        A signal is dropped or replaced once; a second call returns False.
        """
        refuse_inside("replace_signal()")
        line = signal_note(run_id, name, value, id).step
        return await self._answer_signal(run_id, line, LineKind.EFFECT, make_act(actor, reason))

    async def _answer_signal(self, run_id: str, signal: Line, kind: LineKind, act: Act) -> bool:
        if signal.name not in open_signals(await self.store.steps(run_id)):
            return False
        async with self.store.transaction() as transaction:
            return bool(await transaction.record(run_id, [Line(signal.name, kind, signal.value)], act=act))

    async def saga_status(self, run_id: str) -> SagaRecord | None:
        """Return the status of a saga and of each of its steps; None if there is no such saga."""
        found = await self.store.find(Query(ids=(run_id,)))
        return read_saga(found[0], await self.store.steps(run_id)) if found and found[0].envelope.saga else None

    async def resume(self, run_id: str, *, actor: str, reason: str) -> bool:
        """Let a parked message run now, for instance after an operator has removed the cause."""
        refuse_inside("resume()")
        act = make_act(actor, reason)
        async with self.store.transaction() as transaction:
            return bool(await transaction.move([run_id], State.SCHEDULED, act))

    async def restart(self, run_id: str, *, from_step: str, actor: str, reason: str) -> list[Line]:
        """Restart a run from a step: that step and all later ones run again.  Returns the lines that were removed.

        The worker that runs it now can no longer commit.  A dead run is reopened; one that is done stays done.
        Effects of the removed steps are not undone, and their messages are sent again.  Children and commands that they
        sent and that have not ended are cancelled in the same commit, unless they have keys of their own.
        A saga that is being undone, or was, goes forward again, but only from the first step whose undo was begun or
        from an earlier one, because undone steps must run again.  A later step is refused with ``RestartError``, and
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
        self._app.registry.add(workflow)
        return workflow


class DeclareSaga:
    """The decorator ``app.saga(…)`` returns."""

    def __init__(self, app: WorkflowVerbs, settings: TaskSettings) -> None:
        self._app = app
        self._settings = settings

    def __call__(self, function: Callable[Concatenate[Run, P], Awaitable[R]], /) -> Saga[P, R]:
        saga: Saga[P, R] = Saga(self._app, function, self._settings)
        self._app.registry.add(saga)
        return saga


class DeclareStep(Protocol[P]):
    """The decorator ``app.step(undo=…)`` returns; its function must take the arguments that the undo takes."""

    @overload
    def __call__(self, function: Task[P, R], /) -> Task[P, R]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[Concatenate[Context, P], Awaitable[R]], /
    ) -> Callable[Concatenate[Context, P], Awaitable[R]]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> Callable[P, R]: ...
