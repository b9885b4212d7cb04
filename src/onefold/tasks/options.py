"""Stage 1, declare: the options of a task's decorator and of a send, checked at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from difflib import get_close_matches
from typing import Any, Literal, TypedDict, get_args

from onefold import limits
from onefold.clock import to_instant
from onefold.errors import ConfigurationError, seconds
from onefold.message.envelope import check_sequence, refuse_reserved
from onefold.message.keys import KeySource
from onefold.tasks.gates import GateOptions, GateSettings, check_priority
from onefold.tasks.retry import RetryPolicy

#: The effects of a handler outside its own commit, as it declares them; `docs/guarantees.md` explains the letters.
Effect = Literal["T", "K", "F", "N"]

#: The policy of a task that names none.
DEFAULT_RETRY = RetryPolicy()


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSettings(GateSettings):
    """All settings of a task's decorator."""

    name: str | None = None
    #: A template over the arguments such as ``"{order_id}:charge"``, or a function of them.
    key: KeySource | None = None
    subject: KeySource | None = None
    #: Two sends with one key are the same work if these arguments are equal; all of them by default.
    fingerprint: tuple[str, ...] | None = None
    queue: str = "default"
    #: The version of the arguments; raise it when they change their meaning.
    version: int = 1
    retry: RetryPolicy = DEFAULT_RETRY
    timeout: timedelta | float | None = None
    expires: timedelta | float | None = limits.MESSAGE_RETENTION
    #: How long the key is kept after the message ended.
    key_window: timedelta | float = limits.KEY_WINDOW
    #: ``batch`` shares commits between handlers without SQL of their own; ``now`` has the smallest window for a re-run.
    settle: Literal["batch", "now"] = "batch"
    effects: tuple[Effect, ...] | None = None
    #: A handler that neither beats nor reports progress for this long is shown and logged as stalled.
    beat_within: timedelta | float | None = None
    #: Run each message in its own process, which may die without harm to others.
    isolate: bool = False
    #: The most messages of one run; True for the default number.
    batch: int = 0
    #: Steps that a run of a workflow may have before it is parked for a person.
    max_steps: int | None = None

    def __post_init__(self) -> None:
        known = get_args(Effect)
        if self.effects is not None and not (isinstance(self.effects, tuple) and set(self.effects) <= set(known)):
            raise ConfigurationError(
                f"effects is {self.effects!r}; it must be a tuple of {', '.join(map(repr, known))}"
            )


#: Names of options in other libraries, and the equivalent here.
_ELSEWHERE = {
    **dict.fromkeys(
        ("retries", "max_retries", "max_attempts", "attempts", "retry_policy", "backoff"),
        "retry=RetryPolicy(max_attempts=…, base=…), where max_attempts counts the first run too",
    ),
    **dict.fromkeys(("delay", "countdown", "eta", "at"), "it where you send: task.options(delay=…).send(…)"),
    **dict.fromkeys(("idempotency_key", "unique", "unique_key"), "key='{argument}'"),
    **dict.fromkeys(("time_limit", "soft_time_limit", "job_timeout"), "timeout=…"),
    **dict.fromkeys(("concurrency", "max_concurrency"), "max_running=…"),
    **dict.fromkeys(("ttl", "expire", "expiry", "timeout_at"), "expires=…"),
}


def task_settings(settings: Mapping[str, Any]) -> TaskSettings:
    """Return a decorator's keywords as settings; an unknown one is refused with the name that may be meant."""
    known = [one.name for one in fields(TaskSettings)]
    for name in settings:
        if name not in known:
            close = get_close_matches(name, known, n=1)
            meant = _ELSEWHERE.get(name) or (f"{close[0]}=…" if close else None)
            remedy = f"write {meant}" if meant else f"known: {', '.join(known)}"
            raise ConfigurationError(f"unknown option {name!r}; {remedy}")
    return TaskSettings(**settings)


class TaskOptions(GateOptions, total=False):
    """The same settings as keywords, for decorators that have others beside them."""

    name: str | None
    key: KeySource | None
    subject: KeySource | None
    fingerprint: tuple[str, ...] | None
    queue: str
    version: int
    retry: RetryPolicy
    timeout: timedelta | float | None
    expires: timedelta | float | None
    key_window: timedelta | float
    settle: Literal["batch", "now"]
    effects: tuple[Effect, ...] | None
    beat_within: timedelta | float | None


class SendOptions(TypedDict, total=False):
    """The keywords of ``task.options(…)``."""

    #: The idempotency key, instead of the one made by the task's ``key=``.
    key: str
    #: Send it only after this long, or not before this moment.
    delay: timedelta | float
    at: datetime
    #: Coalesce triggers: within this key's window a second send is a duplicate, whatever its payload.
    #: Exact on every store: the check and the write are atomic.
    deduplicate: str
    deduplicate_for: timedelta | float
    #: It becomes a dead letter with the reason ``expired`` this long after it was due; None keeps it for ever.
    expires: timedelta | float | None
    queue: str
    subject: str
    correlation_id: str
    causation_id: str
    #: Messages with the same key run one at a time, in the order of their sends, or of their ``sequence`` if they have
    #: one: numbers from 1 without gaps.
    ordering_key: str
    sequence: int
    #: From 0 to 9, instead of the task's own.
    priority: int
    trace: str
    tags: dict[str, str]
    #: Whether a second send redrives the first message if that is a dead letter.
    if_dead: Literal["keep", "redrive"]


def check_options(options: SendOptions) -> SendOptions:
    """Refuse options that are unknown, contradict each other or are out of range."""
    unknown = options.keys() - SendOptions.__annotations__.keys()
    if unknown:
        raise ConfigurationError(f"unknown option {min(unknown)!r}; known: {', '.join(SendOptions.__annotations__)}")
    if "delay" in options and "at" in options:
        raise ConfigurationError("delay and at exclude each other")
    if "delay" in options:
        seconds(options["delay"], "delay")
    if (expires := options.get("expires")) is not None:
        seconds(expires, "expires")
    for name in ("key", "subject", "correlation_id", "causation_id", "deduplicate", "ordering_key", "trace"):
        if name in options:
            limits.check_bytes(name, options[name], limits.KEY_BYTES_MAX)
    if "at" in options:
        try:
            due_at = to_instant(options["at"])
        except ValueError as error:
            raise ConfigurationError(f"at: {error}") from error
        if not 0 <= due_at <= limits.DUE_AT_MAX:
            raise ConfigurationError(f"at is {options['at']}; it must lie in the years 1970 to 8999")
    if "queue" in options:
        limits.check_name("queue", options["queue"])
    if "deduplicate_for" in options:
        limits.check_range(
            "deduplicate_for",
            seconds(options["deduplicate_for"], "deduplicate_for"),
            limits.DEDUPLICATION_WINDOW_MIN,
            limits.DEDUPLICATION_WINDOW_MAX,
        )
    if "sequence" in options:
        check_sequence(options["sequence"])
    if "priority" in options:
        check_priority(options["priority"])
    if "key" in options:
        refuse_reserved("idempotency_key", options["key"])
    return options
