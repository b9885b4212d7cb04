"""The plan of a run: its workloads, and the contenders that take turns in each."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.contenders import OURS, RAW
from benchmarks.measures import (
    claiming,
    costs,
    draining,
    killing,
    latency,
    lining,
    neighbours,
    resources,
    sending,
    waiting,
)
from benchmarks.measures.latency import P95
from benchmarks.measures.resources import STATEMENTS
from benchmarks.noise import ALONE, NOISES, Noise
from benchmarks.peers import PEERS
from benchmarks.place import Measure

RATE = "/s"
#: The pages of a run.
RESULTS, NEIGHBOURS = "results", "neighbours"
_ALONE = {"sqlite": (OURS,), "postgres": (OURS,)}


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the report."""

    name: str
    title: str
    unit: str = RATE


@dataclass(frozen=True, slots=True)
class Workload:
    """A measure and its contenders per store, in the order in which they take turns."""

    measure: Measure
    contenders: Mapping[str, tuple[str, ...]]
    rows: tuple[Row, ...]
    #: Fewer rounds for a measure that is long, or that takes rounds by itself.
    rounds_max: int = 5
    #: The code of measures without which this one says nothing.
    needs: str = ""
    #: The page on which its figures are.
    page: str = RESULTS

    @property
    def row(self) -> str:
        """The first row, under which the failure of a contender is reported."""
        return self.rows[0].name

    @property
    def code(self) -> str:
        """The id of its bar: S1 to S13, R1 and R2 for runs that wait, G1 and G2 for lines, N for noise, C for costs."""
        return self.row.partition(" ")[0]

    def taking_part(self, store: str, peers: set[str]) -> list[str]:
        return [name for name in self.contenders.get(store, ()) if name not in PEERS or name in peers]


_WRITES = {
    neighbours.COMMITS: ("commits of an idle worker", RATE),
    neighbours.BYTES: ("bytes to the log of an idle worker", RATE),
}


def _noise_rows(code: str, title: str, due: Mapping[str, str]) -> tuple[Row, ...]:
    """Return the rows beside a kind of noise; ``due`` has the tasks whose due messages are measured, by row."""
    measured = {"": ("latency", "ms"), neighbours.DRAIN: ("drain", RATE)}
    if due:
        measured[neighbours.SEND] = ("p90 of sends", "ms")
        measured |= {what: (f"due one, {task}", "ms") for what, task in due.items()} | _WRITES
    return tuple(
        Row(neighbours.row_of(code, what), f"{title}, {name}", unit) for what, (name, unit) in measured.items()
    )


def _beside(noise: Noise) -> Workload:
    rows = _noise_rows(noise.code, noise.title, {neighbours.DUE: noise.gated} if noise.gated else {})
    return Workload(neighbours.beside(noise), _ALONE, rows, rounds_max=1, needs=ALONE, page=NEIGHBOURS)


_WITHOUT_NOISE = Workload(
    neighbours.alone(),
    _ALONE,
    _noise_rows(ALONE, "no noise", {task: task for task in neighbours.GATED}),
    rounds_max=1,
    page=NEIGHBOURS,
)
#: Without noise before, in the middle and after, so that a machine that becomes slower meanwhile is noticed.
_MIDDLE = len(NOISES) // 2
_NOISE = (
    _WITHOUT_NOISE,
    *map(_beside, NOISES[:_MIDDLE]),
    _WITHOUT_NOISE,
    *map(_beside, NOISES[_MIDDLE:]),
    _WITHOUT_NOISE,
)


def _cost_rows(row: str, title: str) -> tuple[Row, ...]:
    """Return the rows of one cost: each store has the first and one of the others."""
    return (
        Row(row, title, "bytes"),
        Row(f"{row} {costs.STATEMENTS}", title, "statements"),
        Row(f"{row} {costs.PAGES}", title, "pages"),
    )


_COSTS = (
    Workload(
        costs.of_plain_messages,
        {"sqlite": (RAW, OURS), "postgres": (RAW, OURS, "pgqueuer", "graphile")},
        (
            *_cost_rows("C1", "send one by one"),
            *_cost_rows(f"C1 {costs.BULK}", "send in bulk"),
            *_cost_rows(f"C1 {costs.DRAIN}", "drain"),
        ),
        rounds_max=1,
        page=NEIGHBOURS,
    ),
    Workload(
        costs.of_own_rows,
        {"sqlite": (RAW, OURS), "postgres": (RAW, OURS)},
        _cost_rows("C2", "drain with own row"),
        rounds_max=1,
        page=NEIGHBOURS,
    ),
    Workload(
        costs.of_steps,
        {"sqlite": (RAW, OURS), "postgres": (RAW, OURS)},
        _cost_rows("C3", "step of a workflow of 5"),
        rounds_max=1,
        page=NEIGHBOURS,
    ),
    Workload(
        costs.of_small_messages,
        _ALONE,
        (
            *_cost_rows("C4", "small: send one by one"),
            *_cost_rows(f"C4 {costs.BULK}", "small: send in bulk"),
            *_cost_rows(f"C4 {costs.DRAIN}", "small: drain"),
            *_cost_rows(f"C4 {costs.WITH_ROW}", "small: drain with own row"),
            *_cost_rows(f"C4 {costs.AT_GATE}", "small: drain at gates"),
            *_cost_rows(f"C4 {costs.STEP}", "small: step of one run"),
        ),
        rounds_max=1,
        page=NEIGHBOURS,
    ),
)


WORKLOADS = (
    Workload(
        sending.one_by_one,
        {"sqlite": (RAW, OURS, "persist-queue"), "postgres": (RAW, OURS, "pgqueuer")},
        (Row("S1", "send one by one"),),
    ),
    Workload(sending.from_many, _ALONE, (Row("S2", "send, 100 at once"),)),
    Workload(
        sending.in_bulk,
        {"sqlite": (RAW, OURS), "postgres": (RAW, OURS, "pgqueuer", "graphile")},
        (Row("S3", "send in bulk"),),
    ),
    Workload(
        draining.with_one,
        {"sqlite": (RAW, OURS, "huey"), "postgres": (RAW, OURS, "pgqueuer", "graphile")},
        (Row("S4", "drain, 1 process"),),
    ),
    Workload(
        draining.with_two,
        {"sqlite": (RAW, OURS), "postgres": (RAW, OURS, "pgqueuer", "graphile")},
        (Row("S5", "drain, 2 processes"),),
    ),
    Workload(
        draining.with_own_row,
        {"sqlite": (RAW, OURS), "postgres": (RAW, OURS)},
        (Row("S6", "drain with own row"),),
    ),
    Workload(
        draining.with_steps,
        {"sqlite": (RAW, OURS, "DBOS"), "postgres": (RAW, OURS, "absurd", "DBOS")},
        (Row("S7", "workflow, 5 steps"),),
        rounds_max=3,
    ),
    Workload(
        latency.under_light_load,
        {"sqlite": (OURS, "litequeue"), "postgres": (OURS, "huey", "pgqueuer", "graphile")},
        (Row("S8", "latency p50, 20/s", "ms"), Row(P95, "latency p95, 20/s", "ms")),
        rounds_max=3,
    ),
    Workload(
        resources.idle,
        _ALONE,
        (Row("S9", "idle worker", "% of a core"), Row(STATEMENTS, "idle worker", "statements/s")),
        rounds_max=1,
    ),
    Workload(claiming.with_history, _ALONE, (Row("S10", "claim of 100, history kept", "ms"),), rounds_max=1),
    Workload(draining.with_poison, _ALONE, (Row("S11", "drain with 5 % poison"),)),
    Workload(killing.with_killers, _ALONE, (Row(killing.ROW, "drain with 3 killers"),), rounds_max=1),
    Workload(
        claiming.beside_foreign_transaction,
        {"postgres": (OURS,)},
        (Row("S12", "claim of 100, foreign tx open", "ms"),),
        rounds_max=1,
    ),
    Workload(resources.memory, _ALONE, (Row("S13", "memory, 10,000 running", "MB"),), rounds_max=1),
    Workload(
        waiting.parked,
        _ALONE,
        (
            Row("R1", "idle worker, 10,000 runs parked", "% of a core"),
            Row(waiting.STATEMENTS, "idle worker, 10,000 runs parked", "statements/s"),
        ),
        rounds_max=1,
    ),
    Workload(waiting.sleeping, _ALONE, (Row("R2", "start of 100,000 runs due at once"),), rounds_max=1),
    Workload(lining.beside_a_long_line, _ALONE, (Row("G1", "drain beside one line of 50,000"),), rounds_max=3),
    Workload(lining.in_many_lines, _ALONE, (Row("G2", "drain of 10,000 lines"),), rounds_max=3),
    *_NOISE,
    *_COSTS,
)


def chosen(codes: Collection[str]) -> list[Workload]:
    """Return the workloads with these codes, and those that they need."""
    wanted = {*codes, *(workload.needs for workload in WORKLOADS if workload.code in codes)}
    return [workload for workload in WORKLOADS if workload.code in wanted]


def rows_of(workloads: Sequence[Workload]) -> list[Row]:
    """Return their rows, each once, although a workload may be taken more than once in a round."""
    return list({row.name: row for workload in workloads for row in workload.rows}.values())
