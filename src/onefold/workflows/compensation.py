"""Stages 7 to 9 for sagas that have failed: undo, in reverse, every step that was begun.

The journal records that a saga is to be undone before any step is.  Every undo is a step of the same run under a name
of its own, so it is journaled, retried and fenced as any other, and any worker can do it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from onefold import limits
from onefold.errors import LeaseLostError, ReplayError, StoreUnavailableError
from onefold.handlers.environment import Environment
from onefold.handlers.lease import Held, stopped_from_outside
from onefold.handlers.threads import BusyError
from onefold.store import Act, Dead, Failure, Lease, Outcome, Parked, State
from onefold.store.journal_lines import Line, LineKind, encode
from onefold.tasks.failure_text import failure_of
from onefold.tasks.receipt import COMPENSATED
from onefold.tasks.task import Task
from onefold.workflows.cancel import take_back
from onefold.workflows.children import Child, Children
from onefold.workflows.journal import Journal, decode_begun
from onefold.workflows.replay import Parking, Replay, Wait, until_a_person_acts
from onefold.workflows.saga import Planned, Saga, begun_steps, is_of_undo, rehearse, undo_line, undo_name
from onefold.workflows.steps import Never, StepFunction, settings_of

logger = logging.getLogger("onefold")


def undoing(lease: Lease, cause: Failure, journal: Journal | None = None, *, delay: float | None = None) -> Parked:
    """Return the outcome of a saga that has failed for good; it records the cause with everything pending.

    The saga is parked with its wake condition already met, so it is claimed again at once, and that claim undoes it.
    """
    logger.warning(
        "saga_undone run_id=%s message_type=%s error=%s", lease.id, lease.envelope.message_type, cause.error_type
    )
    line = Line(undo_line(lease.replay_count), LineKind.UNDO, encode(cause))
    pending, sends, notes = ([], [], []) if journal is None else (journal.take_pending(), journal.sends, journal.notes)
    awaits = 1 if delay is None else 0
    return Parked(delay, lease.wake - awaits, awaits, cause, (*pending, line), tuple(sends), tuple(notes))


async def compensate(
    saga: Saga[Any, Any],
    held: Held,
    environment: Environment,
    lines: Sequence[Line],
    cause: Failure,
    refusal: Failure | None,
) -> Outcome:
    """Undo, in reverse, the steps that are not undone yet, and return the outcome to be settled.

    The saga is parked while an undo waits, and for a person when one gives up; otherwise it ends here.
    """
    lease = held.lease
    done = {line.name for line in lines if line.kind is LineKind.RESULT}
    begun = [line.name for line in reversed(begun_steps(lines)) if decode_begun(line.value).undo is not None]
    left = [name for name in begun if undo_name(name) not in done]
    # ``expires=`` limits the steps of a saga and not their undos.
    if left and refusal is not None and refusal.reason != "expired":
        return _stuck(lease, lines, undo_name(left[0]), refusal)
    undos = Journal(lease.id, filter(_of_undos, lines), replay_count=sum(map(_is_stuck, lines)))
    for name in begun:
        undos.mark_asked(undo_name(name))
    replay = Replay(lease, undos, environment, held)
    name = ""
    try:
        planned = await rehearse(saga, lease, environment, lines) if left else {}
        for name in left:
            if name not in planned:
                raise ReplayError(lease.id, code="nothing of it", journal=name)
            await _Undo(replay, lines, name, planned[name]).run()
    except Parking:
        return replay.parked()
    except ReplayError as error:
        return until_a_person_acts(lease, error)
    except (LeaseLostError, StoreUnavailableError, BusyError):
        raise
    except BaseException as error:
        if stopped_from_outside(error):
            raise
        return _stuck(lease, lines, undo_name(name or left[0]), failure_of(error, "stuck"))
    if not begun_steps(lines):
        return Dead(cause, key_window=saga.key_window)
    return Dead(msgspec.structs.replace(cause, reason=COMPENSATED), key_window=saga.key_window)


def _of_undos(line: Line) -> bool:
    """Whether undoing needs a line: those of undos, and those of restarts, which are counted."""
    return is_of_undo(line) or line.kind is LineKind.RESTART


def _is_stuck(line: Line) -> bool:
    return line.kind is LineKind.STUCK


def _stuck(lease: Lease, lines: Sequence[Line], name: str, failure: Failure) -> Parked:
    """Return the outcome of a saga that is parked until a person acts; then its undo is tried again."""
    logger.error("saga_stuck run_id=%s undo=%s error=%s", lease.id, name, failure.error_type)
    failure = msgspec.structs.replace(failure, reason="stuck")
    line = Line(f"{name}!{sum(map(_is_stuck, lines))}", LineKind.STUCK, encode(failure))
    return Parked(None, lease.wake, awaits=0, failure=failure, steps=(line,))


@dataclass(frozen=True, slots=True)
class _Undo:
    """The undo of one step."""

    replay: Replay
    lines: Sequence[Line]
    step: str
    planned: Planned

    @property
    def name(self) -> str:
        return undo_name(self.step)

    async def run(self) -> None:
        """Undo the step; raises the error with which the undo failed for good."""
        await self._begin()
        await self._cancel_command()
        undo, args, kwargs = self.planned.undo, self.planned.args, self.planned.kwargs
        if isinstance(undo, Task):
            await self._send(undo, args, kwargs)
        elif not isinstance(undo, Never):  # the code may have changed since the step was begun
            function = StepFunction(undo, settings_of(undo)).within(limits.SAGA_STEP_SECONDS)
            await self.replay.perform(self.name, function, args, kwargs)

    async def _begin(self) -> None:
        """Record that the step is being undone before its undo is called: from then on the step counts as undone.

        Otherwise a restart from a later step would keep this step, whose effect the undo is taking away.
        """
        if self.replay.journal.find(self.name, LineKind.UNDOING) is None:
            await self.replay.record([Line(self.name, LineKind.UNDOING, encode(None))])

    async def _cancel_command(self) -> None:
        """Cancel a command that did not succeed, or discard its dead letter, so that it can have no effect later."""
        known, store = Journal(self.replay.lease.id, self.lines), self.replay.environment.store
        sent, ended = known.sent(self.step, b""), known.ended(self.step)
        # The end of an undo command that a restart took back may come after the restart, and says nothing of this undo.
        not_begun = (LineKind.UNDOING, LineKind.CHILD)
        begun = any(line.name == self.name and line.kind not in not_begun for line in self.lines)
        if begun or sent is None or sent.foreign or (ended is not None and ended.state is State.DONE):
            return
        act = Act(actor="onefold", reason=f"saga {self.replay.lease.id} undoes {self.step}")
        if not await take_back(store, sent.id, act):
            async with store.transaction() as transaction:
                await transaction.move([sent.id], State.DISCARDED, act)

    async def _send(self, undo: Task[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Send the undo as a command and wait for its end; if it died, it is redriven when the saga is resumed."""
        replay, timeout = self.replay, settings_of(undo).timeout_seconds
        ended = replay.journal.ended(self.name)
        resumed = sum(_is_stuck(line) and line.name.startswith(f"{self.name}!") for line in self.lines)
        if ended is not None and ended.state is State.DEAD and resumed >= len(replay.journal.ends(self.name)):
            act = Act(actor="onefold", reason=f"saga {replay.lease.id} was resumed")
            async with replay.environment.store.transaction() as transaction:
                await transaction.move([ended.id], State.SCHEDULED, act)
            await replay.wait(Wait(awaits=1))
        call, since = undo.call(*args, **kwargs), 0 if timeout is None else await self._resumed_at(resumed, timeout)
        child: Child[Any] = Child(Children(replay), self.name, call, timeout, since=since)
        await child

    async def _resumed_at(self, resumed: int, timeout: float) -> int:
        """Return when the saga was last resumed, from which the undo's timeout is counted anew; 0 if it never was."""
        if not resumed:
            return 0
        line, journal = f"{self.name}!{resumed}", self.replay.journal
        for number in range(1, resumed + 1):
            journal.mark_asked(f"{self.name}!{number}")
        if (timer := journal.find(line, LineKind.TIMER)) is None:
            (timer,) = await self.replay.record([Line(line, LineKind.TIMER, encode(timeout))])
        return timer.at
