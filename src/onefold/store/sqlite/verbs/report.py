"""Report: what handlers say about themselves while they run, each by its own fence."""

from __future__ import annotations

from collections.abc import Sequence

from onefold.store import Fenced, Progress, Said, State
from onefold.store.shared.rows import progress_of
from onefold.store.sqlite.numbers import numbers_of, rows_of
from onefold.store.sqlite.session import Session, as_json

#: A claim that ended without ending the message leaves it in one of these.
_WAITING = (State.SCHEDULED, State.PARKED)

Reports = Sequence[tuple[Fenced, Said | None]]


def report(session: Session, reports: Reports) -> list[bool]:
    """Record the reports that count; True for each lease that is still the owner's.

    Only a read when all of them only ask.
    """
    numbers = rows_of(session, [lease for lease, _ in reports])
    asked = as_json([seq for seq in numbers if seq is not None])
    owners = {(seq, id_): (state, fence) for seq, id_, state, fence in session.rows("report_owners", asked)}
    now, owned = session.clock.now(), list[bool]()
    for (lease, said), seq in zip(reports, numbers, strict=True):
        owner = owners.get((seq, lease.id))
        owned.append(owner is not None and owner[1] == lease.fence)
        # Ending the claim raised the fence by one, and no worker has claimed the message since.
        is_last_word = owner is not None and owner[0] in _WAITING and owner[1] == lease.fence + 1
        if said is not None and (owned[-1] or is_last_word):
            session.run("report", seq, lease.fence, said.percent, said.message, now)
    return owned


def progress(session: Session, ids: Sequence[str]) -> dict[str, Progress]:
    """Return how far messages are."""
    numbers = list(numbers_of(session, ids).values())
    return {row[0]: progress_of(row) for row in session.rows("progress", as_json(numbers))}
