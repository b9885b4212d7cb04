"""The faults in the functions of generated programs: errors, delays, lost answers, and death at any point."""

from __future__ import annotations

import random
from collections import Counter
from typing import Literal

from onefold.errors import Reject, Retry
from onefold.testing.programs.outside import KEPT_SECONDS, Outside

#: ``refused``: the provider did nothing and says so.  ``lost``: it did it, and its answer is lost.
Fate = Literal["", "fail", "retry", "reject", "late", "refused", "lost"]

#: How often one place may fail, so that every program comes to its end.
_MISDEEDS_MAX = 4
#: A refused call may be retried after this long, when the provider has forgotten the keys of earlier calls.
_MUCH_LATER_SECONDS = KEPT_SECONDS + 3 * 3_600.0


class Hazards:
    """The faults of one process or one simulated world; there are none once it is ``calm``."""

    def __init__(self, outside: Outside, chance: random.Random) -> None:
        self.outside = outside
        self._chance = chance
        self._misdeeds: Counter[str] = Counter()
        self.calm = False

    # differs between simulated and real processes

    def now(self) -> int:
        """The time by this process's clock."""
        raise NotImplementedError

    def risk_death(self, where: str) -> None:
        """Die here, at random."""
        raise NotImplementedError

    async def dawdle(self, seconds: float) -> None:
        """Take this long."""
        raise NotImplementedError

    # called by the functions of programs

    async def risk(self, where: str, fate: Fate = "") -> None:
        """At random, die here or be late."""
        self.risk_death(where)
        if not self.calm and (fate == "late" or self._chance.random() < 0.05):
            await self.dawdle(self._chance.uniform(0.0, 1.2))
            self.risk_death(where)

    def fate(self, what: str, *fates: Fate) -> Fate:
        """Draw the fault of one call."""
        fate: Fate = self._chance.choice([*fates, "", "", ""])
        if self.calm or self._misdeeds[what] >= _MISDEEDS_MAX:
            return ""
        self._misdeeds[what] += bool(fate)
        return fate

    def suffer(self, fate: Fate) -> None:
        """Raise the error of a fault that prevents the effect."""
        if fate == "fail":
            raise ValueError("it fails")
        if fate == "retry":
            raise Retry(after=self._chance.uniform(0.1, 1.0))
        if fate == "reject":
            raise Reject("it is rejected")
        if fate == "refused":
            raise Retry(after=self._chance.choice([0.2, 0.5, _MUCH_LATER_SECONDS]))

    def value(self) -> int:
        """Draw a return value."""
        return self._chance.randrange(10)
