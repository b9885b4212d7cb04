"""A COMMIT whose reply was lost: find out what became of it, never assume.

The session that was asked may still be committing, so a plain read that finds nothing proves nothing.
Only the lock of the row it had changed does: once it is granted, the other has committed or is gone.
Nor does a read that finds it prove that it is on the synchronous standby too, which the lost reply would have said:
the server shows what it has when it ends the wait, or after a restart.  So what was found is answered when a commit
behind it has been replicated.
(The server's own answer by transaction number is not used: after a crash it may give the same number again.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from onefold.errors import CommitUnknownError
from onefold.store import Again, HandBack, Lease, Parked, State
from onefold.store.journal_lines import Line
from onefold.store.postgres.session import Session
from onefold.store.postgres.transaction import OwnTransaction
from onefold.store.postgres.verbs.settle import Settlement, settle
from onefold.store.postgres.wire.arrays import ids
from onefold.store.postgres.wire.connect import BE_PATIENT
from onefold.store.postgres.wire.reconnect import PersistentWire
from onefold.store.postgres.wire.wire import Wire


async def was_committed(
    link: PersistentWire, session_of: Callable[[Wire], Session], transaction: OwnTransaction
) -> bool:
    """Whether a transaction was committed, as shown by the rows it has written."""
    if not (transaction.settled or transaction.stored or transaction.recorded):
        raise CommitUnknownError(
            "the connection was lost during COMMIT, and nothing onefold wrote can tell whether it happened"
        )

    async def look_up(wire: Wire, _: bool) -> bool:
        found = await _was_written(wire, session_of, transaction)
        if found:
            await wire.rows("replicated")
        return found

    return await link.run(look_up)


async def _was_written(wire: Wire, session_of: Callable[[Wire], Session], transaction: OwnTransaction) -> bool:
    if transaction.settled:
        return await was_settled(wire, transaction.settled)
    if transaction.recorded is not None and not transaction.stored:
        return await _was_recorded(wire, session_of(wire), *transaction.recorded)
    return await was_stored(wire, transaction.stored[0])


async def _was_recorded(wire: Wire, session: Session, message_id: str, step: Line) -> bool:
    async with wire.transaction():
        return await session.journals.was_recorded(message_id, step)


async def settle_again(wire: Wire, session: Session, settlements: Sequence[Settlement]) -> list[bool]:
    """Settle what was not settled the first time, in one transaction; True also for what was."""
    async with wire.transaction():
        # The session that was lost may still be committing, and holds the rows until it has.
        await wire.rows(*BE_PATIENT)
        settled = await _settled(wire, settlements)
        open_ = [s for s, known in zip(settlements, settled, strict=True) if known is None]
        now_won = iter(await settle(session, open_) if open_ else [])
        return [next(now_won) if known is None else known for known in settled]


async def was_settled(wire: Wire, settlements: Sequence[Settlement]) -> bool:
    """Whether the transaction that settled these was committed."""
    async with wire.transaction():
        return all(await _settled(wire, settlements))


async def _settled(wire: Wire, settlements: Sequence[Settlement]) -> list[bool | None]:
    """Say for each whether it was settled by its own fence; None while that fence still holds the message."""
    given = {"ids": ids([lease.id for lease, _ in settlements])}
    alive = {row[0]: row[1:] for row in await wire.rows("settle_lock", given)}
    left_behind = set(await wire.rows("settle_found", given))

    def settled(lease: Lease, outcome: object) -> bool | None:
        fence, state = alive.get(lease.id, (0, State.SCHEDULED))
        if fence == lease.fence:
            return None
        if (lease.id, lease.fence) in left_behind:
            return True
        # An outcome without a failure leaves nothing behind but a message with the next fence that is not leased.
        # If it has been claimed since, the lease is reported lost: nothing was to be kept of it anyway.
        is_free = fence == lease.fence + 1 and state != State.LEASED
        return isinstance(outcome, Again | HandBack | Parked) and is_free

    return [settled(lease, outcome) for lease, outcome in settlements]


async def was_stored(wire: Wire, message_id: str) -> bool:
    """Whether the transaction that stored this message was committed."""
    stored = False
    with suppress(_ProbedError):
        async with wire.transaction():
            stored = not await wire.rows("put_probe", {"id": message_id})
            raise _ProbedError
    return stored


class _ProbedError(Exception):
    """Ends a transaction in which nothing was to be done."""
