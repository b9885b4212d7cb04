"""Stage 7, handle: messages that must not run, and their outcomes."""

from __future__ import annotations

import logging
from typing import Any

from onefold.clock import MICROSECONDS
from onefold.errors import EnvelopeError, SequenceGapError, UnknownArgumentError
from onefold.message.envelope import Envelope
from onefold.store import Again, Dead, Failure, HandBack, Lease, Outcome, damaged
from onefold.tasks.failure_text import failure_of
from onefold.tasks.task import Task

logger = logging.getLogger("onefold")

#: A message from a newer version of the code waits for a newer worker: first this long, because a deployment is usually
#: under way ...
UNSUPPORTED_SECONDS = 30.0
#: ... then as long again as it has waited, up to this long: a message that no worker ever understands is claimed 180
#: times in its week instead of 20,000 times.
UNSUPPORTED_SECONDS_MAX = 3_600.0
#: Types and reasons that were logged as unsupported_version, and how many are remembered.
_LOGGED_MAX = 1_000
_logged: set[tuple[str, str]] = set()


def refuse(task: Task[Any, Any], lease: Lease, quarantine_after: int) -> Outcome | SequenceGapError | None:
    """Return the outcome of a message that must not run, or the error that it failed with; None if it may run."""
    envelope = lease.envelope
    if lease.damage:
        return _dead(task, damaged(lease.damage))
    if lease.crashes >= quarantine_after:
        text = f"its worker died or its session ended {lease.crashes} times while it may have been running"
        return _dead(task, Failure(reason="quarantined", error_type="Crash", error_message=text))
    if is_expired(envelope, lease.claimed_at):
        return expired(task.key_window)
    if not task.understands(envelope):
        return wait_for_newer(lease, f"schema_version: is {envelope.schema_version}; {task.version} is known")
    if task.adopts and task.gate.is_for_all and not (lease.gate or "").startswith(task.gate.prefix):
        return _adopt(task, lease)
    return _judge_gap(task, lease) if lease.gap else None


def wait_for_newer(lease: Lease, why: str) -> Again:
    """Return the outcome of a message that only a newer version of the code can handle."""
    _log_once(lease.envelope.message_type, why, lease.id)
    waited = (lease.claimed_at - _first_due(lease)) / MICROSECONDS
    return Again(min(max(waited, UNSUPPORTED_SECONDS), UNSUPPORTED_SECONDS_MAX), None, counted=False)


def _log_once(message_type: str, why: str, message_id: str) -> None:
    """Log a type and reason once in a process: during a deployment every message of the type may wait."""
    if (message_type, why) not in _logged:
        if len(_logged) >= _LOGGED_MAX:
            _logged.clear()
        _logged.add((message_type, why))
        logger.warning("unsupported_version message_id=%s message_type=%s error=%s", message_id, message_type, why)


def _first_due(lease: Lease) -> int:
    """Return the time from which its retention counts, or its creation if it has none."""
    envelope = lease.envelope
    return envelope.expires_at - envelope.retention if envelope.expires_at else envelope.created_at


def expired(key_window: float) -> Dead:
    """Return the outcome of an expired message."""
    text = "it was not done within its time; see expires="
    failure = Failure(reason="expired", error_type="Expired", error_message=text)
    return Dead(failure, key_window=key_window, ran=False)


def is_expired(envelope: Envelope, at: int) -> bool:
    """Whether it has expired.  The last microsecond counts as over: ``expires=0`` is stored as one microsecond."""
    return 0 < envelope.expires_at <= at + 1


def _dead(task: Task[Any, Any], failure: Failure) -> Dead:
    return Dead(failure, key_window=task.key_window, ran=False)


def _adopt(task: Task[Any, Any], lease: Lease) -> Outcome:
    """Hand back a message to its task's gate, which the task did not have when the message was sent."""
    try:
        arguments = task.signature.decode(lease.envelope.payload_inline or b"")
        gate, ordering_key = task.gate.find(arguments, lease.envelope.ordering_key)
    except UnknownArgumentError as error:
        return wait_for_newer(lease, str(error))
    except EnvelopeError as error:
        return _dead(task, failure_of(error, "contract"))
    return HandBack(gate, ordered=ordering_key is not None)


def _judge_gap(task: Task[Any, Any], lease: Lease) -> Outcome | SequenceGapError:
    error = SequenceGapError(lease.id, lease.envelope.ordering_key or "", lease.envelope.sequence or 0)
    if task.gate.gating is not None and task.gate.gating.gap == "retry":
        return error
    return _dead(task, failure_of(error, "gap"))
