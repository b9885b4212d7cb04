"""For people and for sagas: taking a message back.

A message is simply ended, and whoever runs it can no longer commit.  A saga is asked to undo what it has done instead.
"""

from __future__ import annotations

from collections.abc import Sequence

from onefold.journal import encode
from onefold.status import cause_of, undo_line
from onefold.step import Step, StepKind
from onefold.store import Act, Failure, Query, Record, State, Store


async def take_back(store: Store, message_id: str, act: Act) -> bool:
    """Take a message back, or let it be undone if it is a saga; True when this call did it.

    A crash in the middle leaves it as it was, or taken back.
    """
    found = await store.find(Query(ids=(message_id,)))
    if not found or not found[0].envelope.saga:
        async with store.transaction() as transaction:
            return bool(await transaction.move([message_id], State.CANCELLED, act))
    line = undo_request(found[0], await store.steps(message_id), act)
    if line is None:
        return False
    async with store.transaction() as transaction:
        stands = await transaction.record(message_id, [line], act=act)
    return [step.value for step in stands] == [line.value]


def undo_request(saga: Record, lines: Sequence[Step], act: Act) -> Step | None:
    """Return the line that asks a saga to undo what it has done; None when it has ended or is being undone."""
    if saga.state.ended or cause_of(lines, saga.replay_count) is not None:
        return None
    cause = Failure(reason="cancelled", error_type="Cancelled", error_message=f"{act.actor}: {act.reason}")
    return Step(undo_line(saga.replay_count), StepKind.UNDO, encode(cause))
