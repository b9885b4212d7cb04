"""All measures in rounds: within a round the contenders take turns, so that figures of the same minute are compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.contender import NotBuiltError
from benchmarks.engines import Engine
from benchmarks.place import Place, Scale
from benchmarks.plan import Workload
from benchmarks.results import Results

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Suite:
    """The measures of one store."""

    engine: Engine
    directory: Path
    scale: Scale
    workloads: Sequence[Workload]
    #: The reason why a peer cannot take part, by its name; None for those that can.
    peers: Mapping[str, str | None]

    def turns(self) -> Iterator[tuple[int, int, Workload, str]]:
        """Yield all measures in order, with the round, and how often this one was taken before."""
        taken = Counter[tuple[str, str]]()
        for number in range(self.scale.rounds):
            for workload in self.workloads:
                if number < workload.rounds_max:
                    for name in workload.taking_part(self.engine.name, set(self.peers)):
                        yield number, taken[workload.row, name], workload, name
                        taken[workload.row, name] += 1

    async def run(self, progress: Progress) -> Results:
        results = Results(self.engine.name)
        known: dict[tuple[str, str], int] = {}
        for number, turn, workload, name in self.turns():
            progress(f"{self.engine.name} {number + 1}/{self.scale.rounds} {workload.code} {name}")
            which = (workload.row, name)
            if reason := self.peers.get(name):
                results.fail(*which, f"not installed: {reason}")
            if which in results.figures or which not in results.reasons:
                place = Place(self.engine, self.directory, *which, self.scale, known)
                await _try(workload, place, results, turn)
        return results


async def _try(workload: Workload, place: Place, results: Results, turn: int) -> None:
    try:
        results.add(await workload.measure(place), turn)
    except NotBuiltError:
        results.fail(place.row, place.contender, "not built")
    except Exception as error:
        # The failure of one contender is a row of the report, not the end of the run.
        results.fail(place.row, place.contender, f"failed: {str(error) or type(error).__name__}")
