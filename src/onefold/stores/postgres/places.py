"""Limits of gates: how many places and tokens are free, for whoever holds the gates' rows.

Two claims that only counted would both see the last free place and take it.  So a claim first holds the rows of the
gates it is about, until its commit, and counts in a statement of its own, which sees what the holder before has done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from onefold import limits
from onefold.clock import MICROSECONDS
from onefold.gate import Gating, Rate, name_of
from onefold.stores.gating import Bucket
from onefold.stores.postgres.arrays import numbers, texts
from onefold.stores.postgres.wire import Wire

#: A row that only had to be held is of no use to anybody after a while.
_KEPT = round(limits.DAY * MICROSECONDS)


class Places:
    """What is free at these gates, while their rows are held."""

    def __init__(self, gatings: Mapping[str, Gating], gates: Sequence[str]) -> None:
        self._gatings = gatings
        self._gates = gates
        #: What may be taken, by the key of the row that is held for it; no row is held for what has no limit.
        self._free: dict[str, int] = {}
        self._buckets: dict[str, tuple[Rate, Bucket]] = {}

    @property
    def shut(self) -> set[str]:
        """Names of which nobody may be let through any more, whatever the key."""
        return {key for key, free in self._free.items() if free <= 0 and ":" not in key}

    def _keys(self, gate: str) -> list[str]:
        """Return the rows to hold for a gate: its own and its name's, as far as they have limits."""
        gating = self._gatings[name_of(gate)]
        keys = [gating.name] if gating.max_running is not None or gating.rate is not None else []
        return [*keys, gate] if gating.max_running_each is not None or gating.rate_each is not None else keys

    def _limits(self, key: str) -> tuple[int | None, Rate | None]:
        gating = self._gatings[name_of(key)]
        return (gating.max_running, gating.rate) if key == gating.name else (gating.max_running_each, gating.rate_each)

    async def hold(self, wire: Wire, now: int | None) -> bool:
        """Hold the rows as far as nobody else does, and count; True when somebody else holds some of them."""
        keys = sorted({key for gate in self._gates for key in self._keys(gate)})
        _, held, running = await wire.rows_of_each(
            [
                ("gate_make", {"now": now, "keys": texts(keys), "kept": _KEPT}),
                ("gate_hold", {"now": now, "keys": texts(keys)}),
                (
                    "gate_running",
                    {
                        "gates": texts([key for key in keys if key not in self._gatings]),
                        "names": texts([key for key in keys if key in self._gatings]),
                    },
                ),
            ]
        )
        counted: dict[str, int] = dict(running)
        for key, tokens, at, now_there in held:
            most, rate = self._limits(key)
            free = limits.RUNNING_MAX if most is None else most - counted.get(key, 0)
            if rate is not None:
                # One that nobody has used yet is full.
                known = Bucket(rate.saved, now_there) if tokens is None else Bucket(tokens, at)
                self._buckets[key] = rate, known.refilled(rate, now_there)
                free = min(free, int(self._buckets[key][1].tokens))
            self._free[key] = max(free, 0)
        return len(held) < len(keys)

    def allot(self, waiting: Sequence[tuple[str, bool]], most: int) -> list[int]:
        """Say how many each may have, in turns; of a line, which is the second thing said of each, one."""
        given = [0] * len(waiting)
        going_on = True
        while going_on and most > 0:
            going_on = False
            for place, (gate, is_line) in enumerate(waiting):
                keys = self._keys(gate)
                full = most == 0 or (is_line and given[place]) or any(self._free.get(key, 0) <= 0 for key in keys)
                if full:
                    continue
                for key in keys:
                    self._free[key] -= 1
                given[place] += 1
                most -= 1
                going_on = True
        return given

    async def spend(self, wire: Wire, gates: Sequence[str]) -> None:
        """Write down the tokens that are left after these were let through."""
        spent = Counter(key for gate in gates for key in self._keys(gate) if key in self._buckets)
        if not spent:
            return
        left = {
            key: (rate, bucket._replace(tokens=bucket.tokens - spent[key]))
            for key, (rate, bucket) in self._buckets.items()
        }
        await wire.rows(
            "gate_tokens",
            {
                "keys": texts(list(left)),
                "tokens": numbers(bucket.tokens for _, bucket in left.values()),
                "at": next(bucket.at for _, bucket in left.values()),
                "full_ats": numbers(bucket.full_at(rate) for rate, bucket in left.values()),
            },
        )
