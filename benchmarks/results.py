"""What was measured, and what follows from it; nothing here measures or prints."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.bars import ABSOLUTE, BARS, BEST, Bar, verdict
from benchmarks.contenders import OURS
from benchmarks.peers import PEERS
from benchmarks.place import Figures

NOT_MEASURED = "not measured"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Our figure of one row beside another one."""

    against: str
    #: The other figure; None where the limit is absolute, or nothing was measured.
    figure: float | None
    ratio: float | None
    bar: Bar | None
    #: What to say: the verdict on the bar, why there is no figure, or nothing.
    said: str


@dataclass(slots=True)
class Results:
    """The figures of one store: by row and series, one per round."""

    store: str
    figures: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    #: Why a series has no figure, by the same names; the rest of the run goes on without it.
    reasons: dict[tuple[str, str], str] = field(default_factory=dict)

    def add(self, figures: Figures) -> None:
        for row, series in figures.items():
            for name, values in series.items():
                self.figures.setdefault((row, name), []).extend(values)

    def figure(self, row: str, name: str = OURS) -> float | None:
        figures = self.figures.get((row, name))
        return statistics.median(figures) if figures else None

    def series(self, row: str) -> list[str]:
        """Name whatever was to be measured in a row, whether or not there is a figure, in the order of turns."""
        return list(dict.fromkeys(name for at, name in (*self.figures, *self.reasons) if at == row))

    def ratio(self, row: str, against: str) -> float | None:
        """Return the median of the rounds' ratios, which a slow minute does not distort."""
        ours = self.figures.get((row, OURS), [])
        ratios = [mine / other for mine, other in zip(ours, self._others(row, against), strict=False)]
        return statistics.median(ratios) if ratios else None

    def _others(self, row: str, against: str) -> Sequence[float]:
        if against == ABSOLUTE:
            return [1.0] * len(self.figures.get((row, OURS), []))
        if against == BEST:
            peers = [figures for (at, name), figures in self.figures.items() if at == row and name in PEERS]
            return [min(turn) for turn in zip(*peers, strict=False)]
        return self.figures.get((row, against)) or self.figures.get((against, OURS), [])

    def compare(self, row: str) -> list[Comparison]:
        """Set our figure beside every other of the row and beside what its bars name."""
        bars = {bar.against: bar for bar in BARS.get((row, self.store), ())}
        names = dict.fromkeys([*(name for name in self.series(row) if name != OURS), *bars])
        comparisons = [self._comparison(row, name, bars.get(name)) for name in names]
        if reason := self.reasons.get((row, OURS)):
            comparisons.insert(0, Comparison(ABSOLUTE, None, None, None, reason))
        return comparisons

    def _comparison(self, row: str, against: str, bar: Bar | None) -> Comparison:
        ratio = self.ratio(row, against)
        others = self._others(row, against)
        figure = statistics.median(others) if others and against != ABSOLUTE else None
        if ratio is None:
            said = self.reasons.get((row, against)) or (NOT_MEASURED if bar else "")
        else:
            said = verdict(ratio, bar) if bar else ""
        return Comparison(against, figure, ratio, bar, said)
