"""How often a claim walks through all gates, and which gates it looks at in between.  Pure.

A walk costs the same for a gate that lets nothing through as for one that does.
So a worker that walks in vain, past thousands of gates that are shut or have nothing due, does so for a small share of
its time only.
In between it looks at gates where something has changed: a message became due since the last look, this process has
settled one, or a token has come.
A walk finds the rest: places that other processes freed, and messages whose transactions committed late.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from onefold.clock import MICROSECONDS
from onefold.store import Lease

#: The share of the time that walks in vain may take.
SHARE_MAX = 0.05
#: A walk is worth so much time for each message that it finds.
SECONDS_PER_MESSAGE = 0.005
#: Gates with news that are remembered; with more of them a walk finds some soon.
NEWS_MAX = 1_000
#: Gates that are remembered with the time of their next token.
LATER_MAX = 10_000
#: A message is dated when it is put and seen when that commits, so each look goes back by this much ...
BACK_SECONDS = 0.25
#: ... and this often further, for commits that took long, and for gates that were passed just before walks became rare.
FURTHER_SECONDS, FURTHER_BACK_SECONDS = 0.5, 3.0


class News(NamedTuple):
    """A gate of a queue where something has changed, and whether its messages are in a line."""

    queue: str
    gate: str
    is_line: bool


def news_of(leases: Iterable[Lease]) -> list[News]:
    """Return the gates of messages that have ended or come back."""
    return [
        News(one.envelope.queue, one.gate, one.envelope.ordering_key is not None)
        for one in leases
        if one.gate is not None
    ]


class GatePace:
    """When to walk, and where to look otherwise, for claims of one lane and the same queues."""

    __slots__ = ("_further_at", "_later", "_next_walk", "_remembered", "_seen", "_settled")

    def __init__(self) -> None:
        self._next_walk = 0
        #: Gates of messages that this process has settled, in their order; a claim may take them in another thread.
        self._settled: deque[News] = deque()
        #: Gates by the time at which a token comes, the first one first; and the same gates, to find them.
        self._later: list[tuple[int, News]] = []
        self._remembered: set[News] = set()
        #: Up to when messages that became due have been looked at; 0 before the first look.
        self._seen = 0
        self._further_at = 0

    @property
    def is_rare(self) -> bool:
        """Whether the last walk was in vain, so that news are looked at too."""
        return bool(self._next_walk)

    def is_walk_due(self, steady: int) -> bool:
        """Whether to walk now."""
        return steady >= self._next_walk

    def walk_soon(self) -> None:
        """Let the next claim walk."""
        self._next_walk = min(self._next_walk, 1)

    def walked(self, began_at: int, steady: int, *, taken: int) -> None:
        """Record a walk that found so many messages; the longer it was in vain, the longer the next one has to wait."""
        in_vain = steady - began_at - taken * round(SECONDS_PER_MESSAGE * MICROSECONDS)
        self._next_walk = steady + round(in_vain / SHARE_MAX) if in_vain > 0 else 0

    def settled(self, gates: Iterable[News]) -> None:
        """Look at these gates with the next claim: a message there has ended or came back, or found no room.

        They are remembered while walks are not rare, too: one that is under way may have passed them already.
        """
        self._settled.extend(gates)
        if len(self._settled) > NEWS_MAX:
            while len(self._settled) > NEWS_MAX:
                self._settled.popleft()
            self.walk_soon()

    def wait_for_token(self, gate: News, at: int) -> None:
        """Look at this gate when a token comes."""
        if gate not in self._remembered and len(self._later) < LATER_MAX:
            self._remembered.add(gate)
            heapq.heappush(self._later, (at, gate))

    def take_news(self, now: int) -> list[News]:
        """Return the gates that were settled, and those for which a token has come, and forget them."""
        news = [self._settled.popleft() for _ in range(len(self._settled))]
        while self._later and self._later[0][0] <= now:
            _, gate = heapq.heappop(self._later)
            self._remembered.discard(gate)
            news.append(gate)
        return news

    def since(self, steady: int) -> int:
        """Return from when on to look for messages that became due."""
        if steady < self._further_at:
            return self._seen - round(BACK_SECONDS * MICROSECONDS)
        self._further_at = steady + round(FURTHER_SECONDS * MICROSECONDS)
        return self._seen - round(FURTHER_BACK_SECONDS * MICROSECONDS)

    def looked(self, now: int, *, found: int) -> None:
        """Record a look at so many messages that had become due; with very many a walk finds them sooner."""
        self._seen = now
        if found >= NEWS_MAX:
            self.walk_soon()
