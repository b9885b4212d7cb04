"""For operators and for sagas: cancel a message.

A message is ended, and the worker that runs it can no longer commit.  A saga is asked to undo its steps instead.
"""

from __future__ import annotations

from collections.abc import Sequence

from onefold.store import Act, Failure, Query, Record, State, Store
from onefold.store.journal_lines import Line, LineKind, encode
from onefold.workflows.saga import cause_of, undo_line


async def take_back(store: Store, message_id: str, act: Act) -> bool:
    """Cancel a message, or ask it to undo its steps if it is a saga; True when this call did it.

    A crash in the middle leaves it as it was, or cancelled.
    """
    found = await store.find(Query(ids=(message_id,)))
    if not found or not found[0].envelope.saga:
        async with store.transaction() as transaction:
            return bool(await transaction.move([message_id], State.CANCELLED, act))
    line = undo_request(found[0], await store.steps(message_id), act)
    if line is None:
        return False
    async with store.transaction() as transaction:
        recorded = await transaction.record(message_id, [line], act=act)
    return [step.value for step in recorded] == [line.value]


def undo_request(saga: Record, lines: Sequence[Line], act: Act) -> Line | None:
    """Return the line that asks a saga to undo its steps; None when it has ended or is being undone."""
    if saga.state.ended or cause_of(lines, saga.replay_count) is not None:
        return None
    cause = Failure(reason="cancelled", error_type="Cancelled", error_message=f"{act.actor}: {act.reason}")
    return Line(undo_line(saga.replay_count), LineKind.UNDO, encode(cause))
