"""What is to be reached, as ratios within one run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from benchmarks import workloads
from benchmarks.workloads import Place

#: A miss by less than this is a tie: figures of one run are no more exact.
TIE = 0.9

#: What a bar compares our figure with: the raw loop in the same round, or another figure of ours.
RAW = "raw"

Measure = Callable[[Place], Awaitable[float]]


@dataclass(frozen=True, slots=True)
class Workload:
    """One row per store."""

    code: str
    title: str
    measure: Measure
    #: Messages drained once beforehand, to learn how many fill a measure; 0 for sending, which goes by the clock.
    pilot: int = 0
    #: Whether the raw loop takes part; where it has nothing to compare with, it does not.
    raw: bool = True


@dataclass(frozen=True, slots=True)
class Bar:
    """The least ratio."""

    least: float
    against: str = RAW
    #: Where the number comes from, if it is not the project's own.
    remark: str = ""


WORKLOADS = (
    Workload("S1", "send one by one", workloads.send_one_by_one),
    Workload("S2", "send, 100 at once", workloads.send_from_many, raw=False),
    Workload("S3", "send in bulk", workloads.send_in_bulk),
    Workload("S4", "drain, 1 process", workloads.drain_with_one, pilot=5_000),
    Workload("S5", "drain, 2 processes", workloads.drain_with_two, pilot=5_000),
    Workload("S6", "drain with own row", workloads.drain_transactional, pilot=500),
)

# Until the peers run here too, a bar set by one of them is its recorded share of the raw loop.
_RECORDED = "from pgqueuer's recorded share of raw"

BARS = {
    ("S1", "sqlite"): Bar(0.8),
    ("S2", "sqlite"): Bar(5.0, against="S1"),
    ("S3", "sqlite"): Bar(0.35),
    ("S4", "sqlite"): Bar(0.35),
    ("S5", "sqlite"): Bar(0.9, against="S4"),
    ("S6", "sqlite"): Bar(0.4),
    ("S1", "postgres"): Bar(0.7),
    ("S2", "postgres"): Bar(5.0, against="S1"),
    ("S3", "postgres"): Bar(0.35, remark=_RECORDED),
    ("S4", "postgres"): Bar(0.37, remark=f"1.2 x, {_RECORDED}"),
    ("S5", "postgres"): Bar(0.42, remark=f"1.4 x, {_RECORDED}"),
    ("S6", "postgres"): Bar(0.5),
}


def verdict(ratio: float, bar: Bar) -> str:
    """Say whether a ratio reaches its bar, and if not, by how much it misses."""
    share = ratio / bar.least
    if share >= 1:
        return "reached"
    return f"tie (-{1 - share:.0%})" if share > TIE else f"missed by {1 - share:.0%}"
