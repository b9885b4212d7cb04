"""After a restore from backup: workers that hold leases from before it must not be able to write any more."""

from __future__ import annotations

from collections.abc import Callable

from onefold import limits
from onefold.store.postgres.session import FIRST_ID, Session
from onefold.store.postgres.wire.pool import Pool
from onefold.store.postgres.wire.wire import Wire

#: Fences raised in one commit, during which all other writers wait.
_PAGE = 10_000


async def restore(pool: Pool, session_of: Callable[[Wire], Session]) -> int:
    """Raise every fence and end every lease; return how many leases ended.

    In pages, each with a commit of its own: after a crash in the middle it is simply called again.
    """
    ended, after = 0, FIRST_ID

    async def page(wire: Wire, _: bool) -> tuple[int, str | None]:
        async with wire.transaction():
            return await _raise_fences(session_of(wire), after)

    last: str | None = FIRST_ID
    while last is not None:
        after = last
        number, last = await pool.run(page)
        ended += number
    return ended


async def _raise_fences(session: Session, after: str) -> tuple[int, str | None]:
    """Raise the fences of the next messages and end their leases; return how many ended, and the last message."""
    await session.wire.rows("restored_lock")
    ended, last = (await session.wire.rows("restored", {"after": after, "limit": _PAGE, "leap": limits.FENCE_LEAP}))[0]
    return ended, last
