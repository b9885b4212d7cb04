"""The dangers in the functions of generated programs: they fail, are late, get no answer, and die in any place."""

from __future__ import annotations

import random
from collections import Counter
from typing import Literal

from onefold.errors import Reject, Retry
from onefold.testing.programs.outside import KEPT_SECONDS, Outside

#: ``refused``: the provider did nothing and says so.  ``lost``: it did, and the answer does not arrive.
Fate = Literal["", "fail", "retry", "reject", "late", "refused", "lost"]

#: How often one place may misbehave, so that every program comes to its end.
_MISDEEDS_MAX = 4
#: A provider that refuses a call wants it again after this long, when it has forgotten earlier ones.
_MUCH_LATER_SECONDS = KEPT_SECONDS + 3 * 3_600.0


class Hazards:
    """The dangers of one process, or of one simulated world; calm, there are none."""

    def __init__(self, outside: Outside, chance: random.Random) -> None:
        self.outside = outside
        self._chance = chance
        self._misdeeds: Counter[str] = Counter()
        self.calm = False

    # what differs between simulated and real processes

    def now(self) -> int:
        """The time by this process's clock."""
        raise NotImplementedError

    def risk_death(self, where: str) -> None:
        """Die here, or not."""
        raise NotImplementedError

    async def dawdle(self, seconds: float) -> None:
        """Take time."""
        raise NotImplementedError

    # what functions do

    async def risk(self, where: str, fate: Fate = "") -> None:
        """Die here, be late, or do neither."""
        self.risk_death(where)
        if not self.calm and (fate == "late" or self._chance.random() < 0.05):
            await self.dawdle(self._chance.uniform(0.0, 1.2))
            self.risk_death(where)

    def fate(self, what: str, *fates: Fate) -> Fate:
        """Draw what becomes of one call."""
        fate: Fate = self._chance.choice([*fates, "", "", ""])
        if self.calm or self._misdeeds[what] >= _MISDEEDS_MAX:
            return ""
        self._misdeeds[what] += bool(fate)
        return fate

    def suffer(self, fate: Fate) -> None:
        """Raise what a fate means before anything was done."""
        if fate == "fail":
            raise ValueError("it fails")
        if fate == "retry":
            raise Retry(after=self._chance.uniform(0.1, 1.0))
        if fate == "reject":
            raise Reject("it is rejected")
        if fate == "refused":
            raise Retry(after=self._chance.choice([0.2, 0.5, _MUCH_LATER_SECONDS]))

    def value(self) -> int:
        """Draw what a call returns."""
        return self._chance.randrange(10)
