"""Stage 1, declare: the tasks of one app, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from onefold.envelope import Envelope
from onefold.errors import ConfigurationError, EnvelopeError
from onefold.gate import Gating
from onefold.schedule import Catchup
from onefold.task import Task
from onefold.timetable import Timetable
from onefold.transport import Transport


@dataclass(frozen=True, slots=True)
class Recurring:
    """A task that is sent by itself, again and again, as its code says."""

    task: Task[Any, Any]
    timetable: Timetable
    catchup: Catchup
    #: In microseconds.
    window: int | None

    def __post_init__(self) -> None:
        try:
            self.task.call()
        except (TypeError, EnvelopeError) as error:
            raise ConfigurationError(
                f"{self.task.name} recurs, so it must be callable without arguments ({error}); give them defaults, "
                "or make a schedule for one call of it with app.schedule()"
            ) from error


@dataclass(frozen=True, slots=True)
class Inlet:
    """A stream of a broker whose entries become messages here."""

    transport: Transport
    source: str
    #: Only these are taken; None for every task and topic of the app.
    types: frozenset[str] | None = None
    #: How entries are read that hold no envelope of onefold's.
    read: Callable[[bytes], Envelope] | None = None


class Registry:
    """The tasks of one app by name; of one that has several versions, the newest."""

    def __init__(self) -> None:
        self.tasks: dict[str, Task[Any, Any]] = {}
        self._pinned: dict[tuple[str, int], Task[Any, Any]] = {}
        #: How messages are let through gates, by the gates' names.
        self.gatings: dict[str, Gating] = {}
        #: Those of them that are told of dead letters.
        self.hooks: dict[str, Task[Any, Any]] = {}
        #: Those of them that recur.
        self.recurring: dict[str, Recurring] = {}
        #: What is received from brokers, by its source.
        self.inlets: dict[str, Inlet] = {}
        #: The brokers that are received from and relayed to.
        self.transports: list[Transport] = []

    def add_transport(self, transport: Transport) -> None:
        """Have it opened by workers."""
        if not any(one is transport for one in self.transports):
            self.transports.append(transport)

    def add(self, task: Task[Any, Any]) -> None:
        """Register a task; two with one name, or one name and version if it is pinned, are refused."""
        other = self.tasks.get(task.name)
        if other is not None and not (task.pinned and other.pinned):
            raise ConfigurationError(f"two tasks are named {task.name!r}; give one of them another name=")
        if task.pinned:
            if (task.name, task.version) in self._pinned:
                raise ConfigurationError(f"{task.name!r} has two versions {task.version}; give one another version=")
            self._pinned[task.name, task.version] = task
        self._agree(task)
        if other is None or other.version < task.version:
            self.tasks[task.name] = task

    def _agree(self, task: Task[Any, Any]) -> None:
        """Who shares a gate must say the same about it: a claim knows one answer for all."""
        if (gating := task.gate.gating) is not None and self.gatings.setdefault(gating.name, gating) != gating:
            raise ConfigurationError(
                f"{task.name}: the gate {gating.name!r} was declared with other limits; give all who share it the same"
            )

    def handler(self, envelope: Envelope) -> Task[Any, Any]:
        """Return what handles a message."""
        return self._pinned.get((envelope.message_type, envelope.schema_version)) or self.tasks[envelope.message_type]

    def knows(self, task: Task[Any, Any]) -> bool:
        """Whether this very task was registered here."""
        return task in (self.tasks.get(task.name), self._pinned.get((task.name, task.version)))

    def queues(self) -> list[str]:
        """Return the queues the tasks are sent to."""
        return sorted({task.queue for task in (*self.tasks.values(), *self._pinned.values())}) or ["default"]

    def types(self) -> list[str]:
        """Return what can be handled here, as claims ask for it; see ``Envelope.claimed_as``."""
        # Also plainly for what is pinned: a message from elsewhere may name no version, and goes to the newest.
        return sorted([*self.tasks, *(f"{name}@{version}" for name, version in self._pinned)])
