"""The bars to reach: ratios within one run, and a few absolute limits."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.contenders import RAW
from benchmarks.measures import lining, neighbours, waiting
from benchmarks.measures.claiming import BEGINNING, EMPTY
from benchmarks.measures.draining import HEALTHY
from benchmarks.measures.resources import STATEMENTS
from benchmarks.noise import ALONE, NOISES, Noise

#: A miss by less than this is a tie, because figures of one run are not more exact.
TIE = 0.1

#: Runs that are due at once may take half as long again as plain messages do.
_SOON = 1 / 1.5
#: Compare with the peer that was the best in the round.
BEST = "best peer"
#: Compare with nothing: the limit is in the row's own unit.
ABSOLUTE = ""


@dataclass(frozen=True, slots=True)
class Bar:
    """A limit for our figure divided by another one."""

    limit: float
    #: A series of the same row, another row's figure of ours, ``BEST`` or ``ABSOLUTE``.
    against: str
    most: bool = False
    #: Whether this is a goal for later, which a run may still miss.
    aim: bool = False

    def __str__(self) -> str:
        return f"{'aim ' if self.aim else ''}{'≤' if self.most else '≥'} {self.limit:g}"


def least(limit: float, against: str = RAW) -> Bar:
    return Bar(limit, against)


def most(limit: float, against: str = ABSOLUTE) -> Bar:
    return Bar(limit, against, most=True)


def aim(against: str) -> Bar:
    return Bar(1.0, against, aim=True)


#: PostgreSQL's background writer notes every 15 seconds which transactions run, if anything was written meanwhile;
#: the note is of some 100 bytes, in a window of six seconds.
_SERVER_BYTES_PER_SECOND = 50.0
_NOTHING = 0.0


def _beside(noise: Noise, store: str) -> dict[tuple[str, str], tuple[Bar, ...]]:
    """Return the bars of one kind of noise: against the same measures without it."""

    def than_alone(what: str) -> str:
        return neighbours.row_of(ALONE, what)

    bars = {"": most(1.5, than_alone("")), neighbours.DRAIN: least(0.7, than_alone(neighbours.DRAIN))}
    if noise.gated:
        bars |= {
            neighbours.SEND: most(2.0, than_alone(neighbours.SEND)),
            neighbours.DUE: most(1.5, than_alone(noise.gated)),
            neighbours.COMMITS: most(_NOTHING),
            neighbours.BYTES: most(_SERVER_BYTES_PER_SECOND if store == "postgres" else _NOTHING),
        }
    return {(neighbours.row_of(noise.code, what), store): (bar,) for what, bar in bars.items()}


BARS: dict[tuple[str, str], tuple[Bar, ...]] = {
    ("S1", "sqlite"): (least(0.6), aim("persist-queue")),
    ("S1", "postgres"): (least(0.7), aim("pgqueuer")),
    ("S2", "sqlite"): (least(5.0, "S1"),),
    ("S2", "postgres"): (least(5.0, "S1"),),
    ("S3", "sqlite"): (least(0.35),),
    ("S3", "postgres"): (least(1.0, "pgqueuer"), aim("graphile")),
    ("S4", "sqlite"): (least(0.35), least(8.0, "huey")),
    ("S4", "postgres"): (least(1.2, "pgqueuer"), aim("graphile")),
    ("S5", "sqlite"): (least(0.9, "S4"),),
    ("S5", "postgres"): (least(1.4, "pgqueuer"), aim("graphile")),
    ("S6", "sqlite"): (least(0.4),),
    ("S6", "postgres"): (least(0.5),),
    ("S7", "sqlite"): (least(0.4), least(8.0, "DBOS")),
    ("S7", "postgres"): (least(0.35), least(4.0, "absurd")),
    ("S8", "sqlite"): (most(0.7, "litequeue"),),
    ("S8", "postgres"): (most(1.15, BEST),),
    ("S9", "sqlite"): (most(1.0),),
    ("S9", "postgres"): (most(1.0),),
    (STATEMENTS, "postgres"): (most(2.0),),
    ("S10", "sqlite"): (most(1.3, EMPTY),),
    ("S10", "postgres"): (most(1.3, EMPTY),),
    ("S11", "sqlite"): (least(0.75, HEALTHY),),
    ("S11", "postgres"): (least(0.75, HEALTHY),),
    ("S12", "postgres"): (most(2.0, BEGINNING),),
    ("S13", "sqlite"): (most(120.0),),
    ("S13", "postgres"): (most(120.0),),
    ("R1", "sqlite"): (most(1.0),),
    ("R1", "postgres"): (most(1.0),),
    (waiting.STATEMENTS, "postgres"): (most(2.0),),
    ("R2", "sqlite"): (least(_SOON, waiting.PLAIN),),
    ("R2", "postgres"): (least(_SOON, waiting.PLAIN),),
    ("G1", "sqlite"): (least(0.8, lining.WITHOUT),),
    ("G1", "postgres"): (least(0.8, lining.WITHOUT),),
    ("G2", "sqlite"): (least(0.5, lining.WITHOUT),),
    ("G2", "postgres"): (least(0.5, lining.WITHOUT),),
    # The physical costs of small messages as they were before the work on size began.
    ("C4", "sqlite"): (most(15_006),),
    ("C4 bulk", "sqlite"): (most(807),),
    ("C4 drain", "sqlite"): (most(1_016),),
    ("C4 gate", "sqlite"): (most(7_209),),
    ("C4 step", "sqlite"): (most(9_874),),
    ("C4", "postgres"): (most(930),),
    ("C4 bulk", "postgres"): (most(814),),
    ("C4 drain", "postgres"): (most(810),),
    ("C4 row", "postgres"): (most(1_049),),
    ("C4 step", "postgres"): (most(400),),
}
for _noise in NOISES:
    for _store in ("sqlite", "postgres"):
        BARS |= _beside(_noise, _store)


def verdict(ratio: float, bar: Bar) -> str:
    """Return whether a ratio reaches its bar, and if not, by how much it misses."""
    if not bar.limit:
        return "reached" if ratio <= 0 else "missed"
    miss = ratio / bar.limit - 1 if bar.most else 1 - ratio / bar.limit
    if miss <= 0:
        return "reached"
    if miss < TIE:
        return f"tie ({miss:.0%})"
    return f"{'short' if bar.aim else 'missed'} by {miss:.0%}"
