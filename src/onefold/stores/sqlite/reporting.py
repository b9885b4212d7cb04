"""Report: what handlers say about themselves while they run, each by its own fence."""

from __future__ import annotations

from collections.abc import Sequence

from onefold.store import Fenced, Progress, Said, State
from onefold.stores.rows import progress_of
from onefold.stores.sqlite.leasing import rows_of
from onefold.stores.sqlite.session import Session, as_json

_SCHEDULED = int(State.SCHEDULED)

Reports = Sequence[tuple[Fenced, Said | None]]


def report(session: Session, reports: Reports) -> list[bool]:
    """Keep what is said by those whose word counts; True for each who is still the owner.

    Only a read when nobody says anything.
    """
    numbers = rows_of(session, [lease for lease, _ in reports])
    asked = as_json([seq for seq in numbers if seq is not None])
    owners = {seq: (state, fence) for seq, state, fence in session.rows("report_owners", asked)}
    now, owned = session.clock.now(), list[bool]()
    for (lease, said), seq in zip(reports, numbers, strict=True):
        owner = owners.get(seq) if seq is not None else None
        owned.append(owner is not None and owner[1] == lease.fence)
        # Who ends a claim without ending the message raises the fence by one, and nobody has claimed it since.
        if said is not None and (owned[-1] or owner == (_SCHEDULED, lease.fence + 1)):
            session.run("report", seq, lease.fence, said.percent, said.message, now)
    return owned


def progress(session: Session, ids: Sequence[str]) -> dict[str, Progress]:
    """Return how far messages are."""
    return {row[0]: progress_of(row) for row in session.rows("progress", as_json(ids))}
