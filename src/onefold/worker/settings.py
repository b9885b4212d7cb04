"""Stage 6, lease: the settings of one worker, and how its queues are written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from onefold import limits
from onefold.errors import ConfigurationError
from onefold.store import Lane


@dataclass(slots=True)
class WorkerSettings:
    """The settings of one worker; see ``app.work``."""

    name: str
    #: Names of queues; ``mail:2`` runs at most two messages of ``mail`` at once.
    queues: Sequence[str]
    concurrency: int = limits.CONCURRENCY
    lease_seconds: float = limits.LEASE
    stop_seconds: float = limits.STOP_SECONDS
    until_idle: bool = False
    lane: Lane = Lane.ANY
    #: Whether it has no supervisor: then it purges, and keeps its own entry in the register.
    alone: bool = True
    #: How many messages of a queue the worker may hold, where that is limited.
    places: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        limits.check_range("concurrency", self.concurrency, 1, limits.CONCURRENCY_MAX)
        limits.check_range("lease", self.lease_seconds, limits.LEASE_MIN, limits.DAY)
        limits.check_name("worker", self.name)
        self.queues, self.places = parse_queues(self.queues)


def parse_queues(given: Sequence[str]) -> tuple[list[str], dict[str, int]]:
    """Parse queues such as ``mail:2`` or ``default``; return their names, and the limits of those that have one."""
    places: dict[str, int] = {}
    names: list[str] = []
    for text in given:
        name, colon, number = text.partition(":")
        names.append(limits.check_name("queue", name))
        if colon:
            if not number.isdecimal():
                raise ConfigurationError(f"queue {text!r} is not a name, or a name, a colon and a number")
            limits.check_range(f"concurrency of queue {name}", int(number), 1, limits.CONCURRENCY_MAX)
            places[name] = int(number)
    return names, places
