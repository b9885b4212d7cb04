"""Stages 7 to 9 for sagas that have failed: undoing, in reverse, every step that was begun.

That a saga is to be undone is a line of its journal before anything is undone.  Every undo is a step of the same run
under a name of its own, so it is journaled, retried and fenced as any other, and taken up by any worker.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from onefold import limits
from onefold.cancelling import take_back
from onefold.children import Child, Children
from onefold.errors import LeaseLostError, ReplayError, StoreUnavailableError
from onefold.holding import Hold, stopped_from_outside
from onefold.journal import Journal, decode_begun, encode
from onefold.receipt import COMPENSATED
from onefold.retry import failure_of
from onefold.saga import Planned, Saga, rehearse
from onefold.status import begun_steps, is_of_undo, undo_line, undo_name
from onefold.step import Step, StepKind
from onefold.stepping import StepFunction, settings_of
from onefold.store import Act, Dead, Failure, Lease, Outcome, Parked, State
from onefold.stretch import Parking, Stretch, Wait, until_a_person_acts
from onefold.task import Task
from onefold.threads import BusyError
from onefold.tools import Tools
from onefold.undo import Never

logger = logging.getLogger("onefold")


def undoing(lease: Lease, cause: Failure, journal: Journal | None = None, *, delay: float | None = None) -> Parked:
    """Return the outcome of a saga that has failed for good: why it is undone is written down with all it did.

    It is claimed again at once, because what it waits for has come, and whoever claims it undoes it.
    """
    logger.warning(
        "saga_undone run_id=%s message_type=%s error=%s", lease.id, lease.envelope.message_type, cause.error_type
    )
    line = Step(undo_line(lease.replay_count), StepKind.UNDO, encode(cause))
    pending, sends, notes = ([], [], []) if journal is None else (journal.take_pending(), journal.sends, journal.notes)
    awaits = 1 if delay is None else 0
    return Parked(delay, lease.wake - awaits, awaits, cause, (*pending, line), tuple(sends), tuple(notes))


async def compensate(
    saga: Saga[Any, Any],
    hold: Hold,
    tools: Tools,
    lines: Sequence[Step],
    cause: Failure,
    refusal: Failure | None,
) -> Outcome:
    """Undo, in reverse, what is not undone yet, and return the outcome to be settled.

    The saga is parked while an undo waits, and for a person when one gives up; otherwise it ends here.
    """
    lease = hold.lease
    through = {line.name for line in lines if line.kind is StepKind.RESULT}
    begun = [line.name for line in reversed(begun_steps(lines)) if decode_begun(line.value).undo is not None]
    left = [name for name in begun if undo_name(name) not in through]
    # How long it may take was said of what it does, not of undoing that.
    if left and refusal is not None and refusal.reason != "expired":
        return _stuck(lease, lines, undo_name(left[0]), refusal)
    undos = Journal(lease.id, filter(_of_undos, lines), replay_count=sum(map(_is_stuck, lines)))
    for name in begun:
        undos.ask(undo_name(name))
    stretch = Stretch(lease, undos, tools, hold)
    name = ""
    try:
        planned = await rehearse(saga, lease, tools, lines) if left else {}
        for name in left:
            if name not in planned:
                raise ReplayError(lease.id, code="nothing of it", journal=name)
            await _Undo(stretch, lines, name, planned[name]).run()
    except Parking:
        return stretch.parked()
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


def _of_undos(line: Step) -> bool:
    """Whether undoing needs to know of a line: its own ones, and how often the saga went back."""
    return is_of_undo(line) or line.kind is StepKind.RESTART


def _is_stuck(line: Step) -> bool:
    return line.kind is StepKind.STUCK


def _stuck(lease: Lease, lines: Sequence[Step], name: str, failure: Failure) -> Parked:
    """Return the outcome of a saga that cannot be undone until a person acts; then that undo is tried anew."""
    logger.error("saga_stuck run_id=%s undo=%s error=%s", lease.id, name, failure.error_type)
    failure = msgspec.structs.replace(failure, reason="stuck")
    line = Step(f"{name}!{sum(map(_is_stuck, lines))}", StepKind.STUCK, encode(failure))
    return Parked(None, lease.wake, awaits=0, failure=failure, steps=(line,))


@dataclass(frozen=True, slots=True)
class _Undo:
    """One step that is undone."""

    stretch: Stretch
    lines: Sequence[Step]
    step: str
    planned: Planned

    @property
    def name(self) -> str:
        return undo_name(self.step)

    async def run(self) -> None:
        """Undo the step; raises what the undo gave up with."""
        await self._begin()
        await self._take_back()
        undo, args, kwargs = self.planned.undo, self.planned.args, self.planned.kwargs
        if isinstance(undo, Task):
            await self._send(undo, args, kwargs)
        elif not isinstance(undo, Never):  # the code may have changed its mind
            function = StepFunction(undo, settings_of(undo)).within(limits.SAGA_STEP_SECONDS)
            await self.stretch.perform(self.name, function, args, kwargs)

    async def _begin(self) -> None:
        """Record that the step is being undone, before anything is: from that line on it counts as undone.

        A restart from behind the step would otherwise keep a step whose effect the undo is taking away.
        """
        if self.stretch.journal.find(self.name, StepKind.UNDOING) is None:
            await self.stretch.record([Step(self.name, StepKind.UNDOING, encode(None))])

    async def _take_back(self) -> None:
        """Take back a command that did not succeed, or close its letter, so that it cannot take effect any more."""
        known, store = Journal(self.stretch.lease.id, self.lines), self.stretch.tools.store
        sent, ended = known.sent(self.step, b""), known.ended(self.step)
        begun = any(line.name == self.name and line.kind is not StepKind.UNDOING for line in self.lines)
        if begun or sent is None or sent.foreign or (ended is not None and ended.state is State.DONE):
            return
        act = Act(actor="onefold", reason=f"saga {self.stretch.lease.id} undoes {self.step}")
        if not await take_back(store, sent.id, act):
            async with store.transaction() as transaction:
                await transaction.move([sent.id], State.DISCARDED, act)

    async def _send(self, undo: Task[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Send the undo as a command and wait for its end; one that died is redriven when the saga is resumed."""
        stretch, timeout = self.stretch, settings_of(undo).timeout_seconds
        ended = stretch.journal.ended(self.name)
        told = sum(_is_stuck(line) and line.name.startswith(f"{self.name}!") for line in self.lines)
        if ended is not None and ended.state is State.DEAD and told >= len(stretch.journal.ends(self.name)):
            act = Act(actor="onefold", reason=f"saga {stretch.lease.id} was resumed")
            async with stretch.tools.store.transaction() as transaction:
                await transaction.move([ended.id], State.SCHEDULED, act)
            await stretch.wait(Wait(awaits=1))
        child: Child[Any] = Child(Children(stretch), self.name, undo.call(*args, **kwargs), timeout)
        await child
