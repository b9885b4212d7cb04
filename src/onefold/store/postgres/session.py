"""One PostgreSQL connection as the verbs use it: inside one transaction, or for statements of their own."""

from __future__ import annotations

import asyncio

from onefold import limits
from onefold.clock import MICROSECONDS, Clock
from onefold.store.postgres.verbs.journal import JournalTable
from onefold.store.postgres.wire.wire import Speaker

#: Comes before every id.
FIRST_ID = "00000000-0000-0000-0000-000000000000"
LINE_RETENTION = round(limits.LINE_RETENTION * MICROSECONDS)


class Session:
    """A connection, the clock that dates what is written through it, and what its transaction has to remember.

    Without a clock the server's time counts.
    """

    def __init__(self, wire: Speaker, clock: Clock | None) -> None:
        self.wire = wire
        self._clock = clock
        #: Queues in which messages of other owners became due; they are notified after the commit.
        self.woken: set[str] = set()
        #: Puts of one transaction judge keys in turn: none may judge a key that another has taken only for the moment.
        self.judging = asyncio.Lock()

    @property
    def now(self) -> int | None:
        """The time by the clock; None where the server is to take its own."""
        return None if self._clock is None else self._clock.now()

    @property
    def journals(self) -> JournalTable:
        """The verbs on journals, on this connection."""
        return JournalTable(self.wire, self.now, self.woken)
