"""The settings of a supervisor and its worker processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onefold import limits
from onefold.worker.settings import parse_queues


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorSettings:
    """The settings of a supervisor and its worker processes; see ``onefold worker --help``."""

    #: The app, as MODULE:APP, which the processes import.
    where: str
    queues: Sequence[str]
    #: The working directory of the processes; None for that of this one.
    directory: str | None = None
    processes: int = 1
    concurrency: int = limits.CONCURRENCY
    lease_seconds: float = limits.LEASE
    stop_seconds: float = limits.STOP_SECONDS
    stall_seconds: float = limits.STALL_SECONDS
    max_messages: int | None = None
    max_memory_bytes: int | None = None
    until_idle: bool = False
    verbose: bool = False

    def __post_init__(self) -> None:
        limits.check_range("processes", self.processes, 1, limits.PROCESSES_MAX)
        limits.check_range("concurrency", self.concurrency, 1, limits.CONCURRENCY_MAX)
        limits.check_range("lease", self.lease_seconds, limits.LEASE_MIN, limits.DAY)
        limits.check_range("stop_after", self.stop_seconds, 0, limits.DAY)
        limits.check_range("stall_after", self.stall_seconds, 1, limits.DAY)
        parse_queues(self.queues)

    @property
    def tick_seconds(self) -> float:
        """The pause between the beats of a process, and between the supervisor's checks."""
        return min(_BEAT_SECONDS_MAX, self.lease_seconds / _BEATS_PER_LEASE)


#: Beats per lease: enough that one may be late and the supervisor still renews before the lease runs out.
_BEATS_PER_LEASE = 6
_BEAT_SECONDS_MAX = 1.0
