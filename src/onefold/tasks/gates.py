"""Stage 1, declare: gates, at which messages wait for a free place, a token or their turn.

A message waits at one gate at most.  How messages are let through is a ``Gating``, which a worker gives the store with
every claim; see ``onefold.store.gates``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, TypedDict

from onefold import limits
from onefold.errors import ConfigurationError, seconds
from onefold.message.keys import KeyFunction, KeySource, from_source
from onefold.store.gates import Gap, Gating, OnFailure, Rate


@dataclass(frozen=True, slots=True, kw_only=True)
class GateSettings:
    """The settings of a task's decorator that are about its gate."""

    #: One gate per key, for limits; a template over the arguments such as ``"{tenant}"``, or a function of them.
    gate: KeySource | None = None
    #: One line per key: its messages run one at a time, in the order of their sends or of their ``sequence``.
    ordering_key: KeySource | None = None
    #: One gate per key, without limits: a key with many messages does not keep the others waiting.
    fair_key: KeySource | None = None
    #: Tasks with one of these share its limits, and must declare the same; without it a task has its own.
    gate_name: str | None = None
    #: How many run at once, whatever the number of workers: in all, and for each key.
    max_running: int | None = None
    max_running_each: int | None = None
    rate: Rate | None = None
    rate_each: Rate | None = None
    #: While an ordered message waits for its next attempt: ``hold`` those behind it, or let them ``skip`` it.
    on_failure: OnFailure = "hold"
    #: When an earlier ``sequence`` is missing: ``wait`` for it for ``gap_after`` and then make a dead letter of the
    #: message, ``retry`` it by its policy, or ``skip`` the missing one.
    gap: Gap = "wait"
    gap_after: timedelta | float = limits.GAP_SECONDS
    #: From 0 to 9; each step counts as a minute of waiting, so no message waits for ever.
    priority: int = 0


class GateOptions(TypedDict, total=False):
    """The same settings as keywords."""

    gate: KeySource | None
    ordering_key: KeySource | None
    fair_key: KeySource | None
    gate_name: str | None
    max_running: int | None
    max_running_each: int | None
    rate: Rate | None
    rate_each: Rate | None
    on_failure: OnFailure
    gap: Gap
    gap_after: timedelta | float
    priority: int


class Place(NamedTuple):
    """The gate at which a message waits, and its key if that is a line."""

    gate: str | None = None
    ordering_key: str | None = None


NOWHERE = Place()


class Gate:
    """Finds the gates of one task's messages; raises for settings that are wrong."""

    def __init__(self, task: str, settings: GateSettings, hints: Mapping[str, Any]) -> None:
        given = {what: getattr(settings, what) for what in ("gate", "ordering_key", "fair_key")}
        sources = {what: source for what, source in given.items() if source is not None}
        if len(sources) > 1:
            raise ConfigurationError(f"{task}: {' and '.join(sources)} exclude each other; a message waits at one gate")
        self._task = task
        self.name = task if settings.gate_name is None else limits.check_name("gate", settings.gate_name)
        #: The beginning of the text of each of its gates.
        self.prefix = f"{self.name}:"
        self.is_ordered = settings.ordering_key is not None
        self._key: KeyFunction | None = None
        for what, source in sources.items():
            self._key = from_source(task, what, source, hints)
        gating = _gating(self.name, settings)
        #: Whether every message of the task has a gate, and not only those sent with an ordering key.
        self.is_for_all = gating.is_limited or self._key is not None
        self.gating = None if not self.is_for_all and gating == Gating(name=self.name) else gating
        self.priority = check_priority(settings.priority)
        self._check(settings, gating)

    def _check(self, settings: GateSettings, gating: Gating) -> None:
        if self._key is None and (gating.max_running_each is not None or gating.rate_each is not None):
            raise ConfigurationError(
                f"{self._task}: max_running_each and rate_each need a key, such as gate='{{user}}'"
            )
        if self.is_ordered and gating.max_running_each is not None:
            raise ConfigurationError(
                f"{self._task}: an ordering key lets one run at a time; leave out max_running_each"
            )
        if settings.gate is not None and not gating.is_limited:
            raise ConfigurationError(f"{self._task}: gate= has no limit; add max_running_each=, or use fair_key=")
        if settings.gate_name is not None and self.gating is None:
            raise ConfigurationError(f"{self._task}: gate_name= names a gate without limits and order; leave it out")
        if self.is_ordered and self.priority:
            raise ConfigurationError(f"{self._task}: {_ORDERED_HAVE_NONE}")

    def find(self, arguments: Mapping[str, Any], ordering_key: str | None, priority: int = 0) -> Place:
        """Return the place of a message with these arguments, sent with this ``ordering_key``."""
        if ordering_key is None and self.is_for_all:
            key = "" if self._key is None else self._key(arguments)
            place = Place(f"{self.name}:{key}", key if self.is_ordered else None)
        elif ordering_key is None:
            return NOWHERE
        elif self._key is not None and not self.is_ordered:
            raise ConfigurationError(f"{self._task} has a gate per key, so it takes no ordering_key as well")
        else:
            place = Place(f"{self.name}:{ordering_key}", ordering_key)
        if priority and place.ordering_key is not None:
            raise ConfigurationError(f"{self._task}: {_ORDERED_HAVE_NONE}")
        return place


_ORDERED_HAVE_NONE = "messages with an ordering key run in their order, so they have no priority"


def check_priority(priority: int) -> int:
    """Refuse a priority outside its range."""
    limits.check_range("priority", priority, 0, limits.PRIORITY_MAX)
    return priority


def _gating(name: str, settings: GateSettings) -> Gating:
    for what in ("max_running", "max_running_each"):
        if (limit := getattr(settings, what)) is not None:
            limits.check_range(what, limit, 1, limits.RUNNING_MAX)
    if settings.on_failure not in ("hold", "skip"):
        raise ConfigurationError(f"on_failure is {settings.on_failure!r}; it must be 'hold' or 'skip'")
    if settings.gap not in ("wait", "retry", "skip"):
        raise ConfigurationError(f"gap is {settings.gap!r}; it must be 'wait', 'retry' or 'skip'")
    gap_seconds = seconds(settings.gap_after, "gap_after")
    limits.check_range("gap_after", gap_seconds, 0, limits.GAP_SECONDS_MAX)
    return Gating(
        name=name,
        max_running=settings.max_running,
        max_running_each=settings.max_running_each,
        rate=settings.rate,
        rate_each=settings.rate_each,
        on_failure=settings.on_failure,
        gap=settings.gap,
        gap_seconds=gap_seconds,
    )
