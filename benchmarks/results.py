"""The figures of a run, and the ratios and verdicts that follow from them; pure."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

from benchmarks.bars import ABSOLUTE, BARS, BEST, Bar, verdict
from benchmarks.contenders import OURS
from benchmarks.noise import ALONE
from benchmarks.peers import PEERS
from benchmarks.place import Figures

_PRIVATE = re.compile(r"\w+://[^\s'\",)]+|(?<![\w.])/[\w.+-]+(?:/[\w.+-]+)+")
_REASON_CHARACTERS = 200
NOT_MEASURED = "not measured"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Our figure of one row beside another one."""

    against: str
    #: The other figure; None if the limit is absolute, or nothing was measured.
    figure: float | None
    ratio: float | None
    bar: Bar | None
    #: The verdict on the bar, or the reason for a missing figure, or nothing.
    said: str


@dataclass(slots=True)
class Results:
    """The figures of one store: by row and series, then by round."""

    store: str
    figures: dict[tuple[str, str], dict[int, float]] = field(default_factory=dict)
    #: The reasons of failures, by the same names; the rest of the run continues.
    reasons: dict[tuple[str, str], str] = field(default_factory=dict)

    def add(self, figures: Figures, number: int = 0) -> None:
        """Add the figures of a round; a measure with several rounds of its own begins with this one."""
        for row, series in figures.items():
            for name, values in series.items():
                self.figures.setdefault((row, name), {}).update(enumerate(values, start=number))

    def fail(self, row: str, name: str, reason: str) -> None:
        """Record the reason for a missing figure, without addresses and directories of the machine."""
        self.reasons[row, name] = _PRIVATE.sub("…", " ".join(reason.split()))[:_REASON_CHARACTERS]

    def figure(self, row: str, name: str = OURS) -> float | None:
        return _median(self.figures.get((row, name), {}))

    def rounds(self, row: str) -> dict[int, float]:
        """Return our figures of a row, by round."""
        return self.figures.get((row, OURS), {})

    def series(self, row: str) -> list[str]:
        """Return the series that were to be measured in a row, with or without a figure, in the order of turns."""
        return list(dict.fromkeys(name for at, name in (*self.figures, *self.reasons) if at == row))

    def ratio(self, row: str, against: str) -> float | None:
        """Return the median of the rounds' ratios, which a slow minute does not distort."""
        ours, others = self.rounds(row), self._others(row, against)
        return _median({number: ours[number] / others[number] for number in ours.keys() & others.keys()})

    def _others(self, row: str, against: str) -> dict[int, float]:
        if against == ABSOLUTE:
            return dict.fromkeys(self.rounds(row), 1.0)
        if against == BEST:
            peers = [figures for (at, name), figures in self.figures.items() if at == row and name in PEERS]
            return {number: min(peer[number] for peer in peers if number in peer) for peer in peers for number in peer}
        others = self.figures.get((row, against)) or self.figures.get((against, OURS), {})
        if against.partition(" ")[0] == ALONE:
            # Those were taken before, in the middle and after, not in the rounds of this row.
            typical = _median(others)
            return {} if typical is None else dict.fromkeys(self.rounds(row), typical)
        return others

    def compare(self, row: str) -> list[Comparison]:
        """Compare our figure with every other of the row and with those that its bars name."""
        bars = {bar.against: bar for bar in BARS.get((row, self.store), ())}
        names = dict.fromkeys([*(name for name in self.series(row) if name != OURS), *bars]) or [ABSOLUTE]
        return [self._comparison(row, name, bars.get(name)) for name in names]

    def _comparison(self, row: str, against: str, bar: Bar | None) -> Comparison:
        ratio = self.ratio(row, against)
        figure = None if against == ABSOLUTE else _median(self._others(row, against))
        reason = self.reasons.get((row, against)) or self.reasons.get((row, OURS)) or ""
        judged = "" if bar is None else NOT_MEASURED if ratio is None else verdict(ratio, bar)
        # The failure of a single round is mentioned beside the verdict of the others.
        said = reason if ratio is None and reason else "; ".join(filter(None, (judged, reason)))
        return Comparison(against, figure, ratio, bar, said)


def _median(rounds: Mapping[int, float]) -> float | None:
    return statistics.median(rounds.values()) if rounds else None
