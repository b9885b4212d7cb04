"""Stage 1, declare: the tasks of one app, by name."""

from __future__ import annotations

from typing import Any

from onefold.errors import ConfigurationError
from onefold.message.envelope import Envelope
from onefold.schedules.register import Recurring
from onefold.store.gates import Gating
from onefold.tasks.task import Task


class Registry:
    """The tasks of one app, by name; a task with several versions is found as the newest."""

    def __init__(self) -> None:
        self.tasks: dict[str, Task[Any, Any]] = {}
        self._pinned: dict[tuple[str, int], Task[Any, Any]] = {}
        #: The limits of the gates, by the gates' names.
        self.gatings: dict[str, Gating] = {}
        #: Tasks that get a ``DeadNotice`` of every dead letter, by name.
        self.hooks: dict[str, Task[Any, Any]] = {}
        #: Recurring tasks, by name.
        self.recurring: dict[str, Recurring] = {}

    def add(self, task: Task[Any, Any]) -> None:
        """Register a task; a second one of the same name, or of the same name and version if pinned, is refused."""
        other = self.tasks.get(task.name)
        if other is not None and not (task.pinned and other.pinned):
            raise ConfigurationError(f"two tasks are named {task.name!r}; give one of them another name=")
        if task.pinned:
            if (task.name, task.version) in self._pinned:
                raise ConfigurationError(
                    f"two tasks are named {task.name!r} with the version {task.version}; give one another version="
                )
            self._pinned[task.name, task.version] = task
        self._check_gate(task)
        if other is None or other.version < task.version:
            self.tasks[task.name] = task

    def _check_gate(self, task: Task[Any, Any]) -> None:
        """Refuse a task whose gate another task declared with other limits: a claim has one set of limits per gate."""
        if (gating := task.gate.gating) is not None and self.gatings.setdefault(gating.name, gating) != gating:
            raise ConfigurationError(
                f"{task.name}: another task declared the gate {gating.name!r} with other limits; "
                "give all tasks that share a gate the same limits"
            )

    def handler(self, envelope: Envelope) -> Task[Any, Any]:
        """Return the task that handles a message."""
        return self._pinned.get((envelope.message_type, envelope.schema_version)) or self.tasks[envelope.message_type]

    def knows(self, task: Task[Any, Any]) -> bool:
        """Whether this very task was registered here."""
        return task in (self.tasks.get(task.name), self._pinned.get((task.name, task.version)))

    def queues(self) -> list[str]:
        """Return the queues the tasks are sent to."""
        return sorted({task.queue for task in (*self.tasks.values(), *self._pinned.values())}) or ["default"]

    def types(self) -> list[str]:
        """Return the message types that this app handles, as claims ask for them; see ``Envelope.claimed_as``."""
        # Pinned tasks also without a version: a message from a broker may name none, and goes to the newest.
        return sorted([*self.tasks, *(f"{name}@{version}" for name, version in self._pinned)])
