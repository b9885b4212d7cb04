"""Stage 6, lease: the journals of runs that were claimed together are read together.

A journal may be read at any time after the claim: whatever others record from then on raises ``wake``, and a run that
parks without having seen it is due again at once.  So nothing is lost by reading early, and much by reading one by one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from itertools import islice

from onefold import limits
from onefold.journal import has_journal
from onefold.step import Step
from onefold.store import Lease, Store

Lines = asyncio.Future[list[Step]]


class ReadAhead:
    """Reads the journals of the runs that a worker holds, those that come next together with the one that is asked for.

    Where journals are large it reads no more than it is asked for.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._expected: dict[str, Lease] = {}
        self._begun: dict[str, tuple[int, Lines]] = {}
        self._most = limits.READ_AHEAD

    def expect(self, leases: Iterable[Lease]) -> None:
        """These were claimed, and will be asked for in about this order."""
        self._expected.update((lease.id, lease) for lease in leases if lease.envelope.pinned and has_journal(lease))

    def forget(self, lease: Lease) -> None:
        """This one is over, whether or not it was asked for."""
        if self._expected.get(lease.id) is lease:
            del self._expected[lease.id]
        if (begun := self._begun.get(lease.id)) is not None and begun[0] == lease.fence:
            del self._begun[lease.id]

    async def read(self, lease: Lease) -> list[Step]:
        """Return the journal of a run; asks nobody when there can be none."""
        if not has_journal(lease):
            return []
        fence, lines = self._begun.pop(lease.id, (0, None))
        if lines is None or fence != lease.fence:
            lines = self._begin(lease)
        found = await lines
        small = sum(len(step.value) for step in found) <= limits.READ_AHEAD_BYTES
        self._most = limits.READ_AHEAD if small else 1
        return found

    def _begin(self, lease: Lease) -> Lines:
        self._expected.pop(lease.id, None)
        asked = self._ask(lease)
        for one in list(islice(self._expected.values(), self._most - 1)):
            del self._expected[one.id]
            self._begun[one.id] = (one.fence, self._ask(one))
        return asked

    def _ask(self, lease: Lease) -> Lines:
        lines = asyncio.ensure_future(self._store.steps(lease.id))
        # Nobody may ask for it in the end, and then nobody needs to know that it failed.
        lines.add_done_callback(lambda one: one.cancelled() or one.exception())
        return lines
