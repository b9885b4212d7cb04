"""Stage 7, handle: messages that must not run, and what becomes of them instead.  Pure."""

from __future__ import annotations

import logging
from typing import Any

from onefold.errors import EnvelopeError, SequenceGapError
from onefold.retry import failure_of
from onefold.store import Again, Dead, Failure, HandBack, Lease, Outcome
from onefold.task import Task

logger = logging.getLogger("onefold")

#: A message from a newer version of the code waits this long for a newer worker.
UNSUPPORTED_SECONDS = 30.0


def refuse(task: Task[Any, Any], lease: Lease, quarantine_after: int) -> Outcome | SequenceGapError | None:
    """Return the outcome of a message that must not run, or the error it has failed with; None if it may."""
    envelope = lease.envelope
    if lease.crashes >= quarantine_after:
        text = f"its worker died {lease.crashes} times while it may have been running"
        return _dead(task, Failure(reason="quarantined", error_type="Crash", error_message=text))
    if envelope.expires_at and lease.claimed_at >= envelope.expires_at:
        text = "it was not done within its time; see expires="
        return _dead(task, Failure(reason="expired", error_type="Expired", error_message=text))
    if not task.understands(envelope):
        logger.warning("unsupported_version message_id=%s message_type=%s", envelope.id, envelope.message_type)
        return Again(UNSUPPORTED_SECONDS, None, counted=False)
    if task.adopts and task.gate.is_for_all and not (lease.gate or "").startswith(task.gate.prefix):
        return _adopt(task, lease)
    return _judge_gap(task, lease) if lease.gap else None


def _dead(task: Task[Any, Any], failure: Failure) -> Dead:
    return Dead(failure, key_window=task.key_window, ran=False)


def _adopt(task: Task[Any, Any], lease: Lease) -> Outcome:
    """Let a message wait at its task's gate, which the task did not have when it was sent."""
    try:
        arguments = task.signature.decode(lease.envelope.payload_inline or b"")
        gate, ordering_key = task.gate.find(arguments, lease.envelope.ordering_key)
    except EnvelopeError as error:
        return _dead(task, failure_of(error, "contract"))
    return HandBack(gate, ordered=ordering_key is not None)


def _judge_gap(task: Task[Any, Any], lease: Lease) -> Outcome | SequenceGapError:
    error = SequenceGapError(lease.id, lease.envelope.ordering_key or "", lease.envelope.sequence or 0)
    if task.gate.gating is not None and task.gate.gating.gap == "retry":
        return error
    return _dead(task, failure_of(error, "gap"))
