"""Who takes part.  A peer is one more class beside the raw loops, and one more line here."""

from __future__ import annotations

from benchmarks.contender import Contender
from benchmarks.ours import Onefold
from benchmarks.raw_postgres import RawPostgres
from benchmarks.raw_sqlite import RawSQLite

OURS = "onefold"
RAW = "raw"

#: Per store, in the order in which they take turns.
_CONTENDERS: dict[str, dict[str, type[Onefold | RawSQLite | RawPostgres]]] = {
    "sqlite": {RAW: RawSQLite, OURS: Onefold},
    "postgres": {RAW: RawPostgres, OURS: Onefold},
}


def make_contender(store: str, name: str, *, transactional: bool = False) -> Contender:
    """Make one by its names, in the measuring process or in a worker."""
    return _CONTENDERS[store][name](transactional=transactional)


def names(store: str) -> list[str]:
    return list(_CONTENDERS[store])
