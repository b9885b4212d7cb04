"""Try every undo of a saga: after every step, whether the step took effect or not, and each undo twice."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Literal

from onefold.app import App
from onefold.errors import Reject, Snooze
from onefold.store.journal_lines import UNDO_PREFIX
from onefold.tasks.task import Call
from onefold.testing.drain import drain
from onefold.workflows.saga_status import SagaRecord, SagaStatus

#: Longer than retries wait in place, so that the second run of an undo is by another claim.
_AGAIN_SECONDS = 2.0

Moment = Literal["before", "after"]


async def try_undos(app: App, make_call: Callable[[int], Call[Any]], check: Callable[[int], Awaitable[object]]) -> int:
    """Fail a saga at each of its steps and let ``check`` judge what is left; return the number of trials.

    ``make_call(n)`` returns a call of the saga for the n-th trial, with arguments that no other trial has; trial 0 must
    succeed, because it shows which steps there are.  For each step there are two trials: the step fails before it did
    anything, and after it did everything.  In both, every undo is run to its end, reported as failed, and run again.
    ``await check(n)`` raises if an effect of the trial is left.  The app must be open and have a ``FakeClock``.
    Raises ``AssertionError``, naming the step, when a saga is not compensated.
    """
    saga = await _try_one(app, make_call(0), None)
    assert saga.status is SagaStatus.COMPLETED, f"undisturbed, the saga is {saga.status}: {saga.cause}"
    trials = 0
    moments: tuple[Moment, ...] = ("before", "after")
    for step in saga.steps:
        for moment in moments:
            trials += 1
            failed = await _try_one(app, make_call(trials), (step.name, moment))
            told = f"when {step.name} fails {moment} it did what it does, the saga is {failed.status}: {failed}"
            assert failed.status is SagaStatus.COMPENSATED, told
            await check(trials)
    return trials


async def _try_one(app: App, call: Call[Any], fails: tuple[str, Moment] | None) -> SagaRecord:
    receipt = await app.dispatch(call)
    repeated: set[str] = set()

    async def disturb(ctx: Any, proceed: Callable[[], Awaitable[Any]]) -> Any:
        name = _step_of(ctx, receipt.id)
        if name is None or fails is None:
            return await proceed()
        if name == fails[0] and fails[1] == "before":
            raise Reject("it failed before it did anything")
        result = await proceed()
        if name == fails[0]:
            raise Reject("it failed after it did everything")
        if name.startswith(UNDO_PREFIX) and name not in repeated:
            repeated.add(name)
            raise Snooze(after=_AGAIN_SECONDS, reason="run again")
        return result

    app.middleware(disturb)
    try:
        await drain(app)
    finally:
        app._middleware.remove(disturb)
    saga = await app.saga_status(receipt.id)
    assert saga is not None, f"{call.task.name} is not a saga"
    return saga


def _step_of(ctx: Any, run_id: str) -> str | None:
    """Return the step or undo of the saga that runs now: a function that it calls, or a task that it sent."""
    message = getattr(ctx, "message", None)
    if message is None:
        return None
    if message.id == run_id:
        return str(ctx.step)
    prefix = f"workflow:{run_id}/"
    return str(message.causation_id).removeprefix(prefix) if message.causation_id.startswith(prefix) else None
