"""Report: what handlers say about themselves while they run, each by its own fence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onefold.store import Fenced, Progress, Said
from onefold.store.postgres.session import Session
from onefold.store.postgres.verbs.journal import is_id
from onefold.store.postgres.verbs.settle import fenced
from onefold.store.postgres.wire.arrays import bigints, ids, numbers, texts
from onefold.store.shared.rows import progress_of


async def report(session: Session, reports: Sequence[tuple[Fenced, Said | None]]) -> list[bool]:
    given = [(lease, said) for lease, said in reports if is_id(lease.id)]
    percents = [None if said is None or said.percent is None else float(said.percent) for _, said in given]
    parameters: dict[str, Any] = {
        **fenced([lease for lease, _ in given]),
        "now": session.now,
        "percents": numbers(percents),
        "messages": texts(["" if said is None else said.message for _, said in given]),
        "spoken": bigints([int(said is not None) for _, said in given]),
    }
    held = set(await session.wire.rows("report", parameters))
    return [(lease.id, lease.fence) in held for lease, _ in reports]


async def progress(session: Session, message_ids: Sequence[str]) -> dict[str, Progress]:
    given = ids([message_id for message_id in message_ids if is_id(message_id)])
    return {row[0]: progress_of(row) for row in await session.wire.rows("progress", {"ids": given})}
