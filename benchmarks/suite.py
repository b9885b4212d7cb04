"""All measures in rounds: within one the contenders take turns, so that what is compared ran within seconds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.bars import BARS, RAW, Bar, Workload
from benchmarks.contenders import OURS, names
from benchmarks.engines import Engine
from benchmarks.workloads import Place

_STEP = 100


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured."""

    rounds: int
    send_seconds: float
    drain_seconds: float


FULL = Scale(rounds=5, send_seconds=0.8, drain_seconds=2.0)
QUICK = Scale(rounds=1, send_seconds=0.3, drain_seconds=0.5)

Progress = Callable[[str], None]


@dataclass(slots=True)
class Results:
    """Messages per second of one store: by workload and contender, a figure per round."""

    store: str
    rates: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    #: What went wrong, by the same names; the rest of the run goes on without it.
    errors: dict[tuple[str, str], str] = field(default_factory=dict)

    def rate(self, code: str, name: str) -> float | None:
        figures = self.rates.get((code, name))
        return statistics.median(figures) if figures else None

    def ratio(self, code: str, bar: Bar) -> float | None:
        """Return the median of the rounds' ratios, which a slow minute does not distort."""
        ours = self.rates.get((code, OURS), [])
        other = self.rates.get((code, RAW) if bar.against == RAW else (bar.against, OURS), [])
        ratios = [mine / theirs for mine, theirs in zip(ours, other, strict=False)]
        return statistics.median(ratios) if ratios else None

    def bar(self, code: str) -> Bar:
        return BARS[code, self.store]


class Suite:
    """The measures of one store."""

    def __init__(self, engine: Engine, directory: Path, scale: Scale, progress: Progress) -> None:
        self._engine = engine
        self._directory = directory
        self._scale = scale
        self._progress = progress
        self._messages: dict[tuple[str, str], int] = {}
        self._results = Results(engine.name)

    async def run(self, workloads: Sequence[Workload]) -> Results:
        for number in range(self._scale.rounds):
            for workload in workloads:
                for name in names(self._engine.name):
                    if name == OURS or workload.raw:
                        self._progress(f"{self._engine.name} {number + 1}/{self._scale.rounds} {workload.code} {name}")
                        await self._try(workload, name)
        return self._results

    async def _try(self, workload: Workload, name: str) -> None:
        which = (workload.code, name)
        if which in self._results.errors:
            return
        try:
            rate = await self._measure(workload, name)
        except Exception as error:
            # One contender that fails is a row of the report, not the end of the run.
            self._results.errors[which] = f"{type(error).__name__}: {error}"
        else:
            self._results.rates.setdefault(which, []).append(rate)

    async def _measure(self, workload: Workload, name: str) -> float:
        if not workload.pilot:
            return await workload.measure(self._place(name, self._scale.send_seconds))
        which = (workload.code, name)
        if which not in self._messages:
            pilot = await workload.measure(self._place(name, messages=workload.pilot))
            self._messages[which] = self._fitting(pilot, workload)
        rate = await workload.measure(self._place(name, messages=self._messages[which]))
        self._messages[which] = self._fitting(rate, workload)
        return rate

    def _fitting(self, rate: float, workload: Workload) -> int:
        return max(workload.pilot, round(rate * self._scale.drain_seconds / _STEP) * _STEP)

    def _place(self, name: str, seconds: float = 0.0, messages: int = 0) -> Place:
        return Place(self._engine, self._directory, name, seconds, messages)


def measures(scale: Scale, stores: int, workloads: Sequence[Workload]) -> int:
    """How many measures a run takes, for the progress bar."""
    return stores * scale.rounds * sum(2 if workload.raw else 1 for workload in workloads)
