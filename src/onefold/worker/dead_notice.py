"""Stage 8, decide: notices of dead letters, messages that leave in the commit that makes the letter."""

from __future__ import annotations

import logging
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from onefold.message.envelope import derived_key
from onefold.registry import Registry
from onefold.store import Dead, Lease, Outcome
from onefold.transactions.buffer import Prepare

logger = logging.getLogger("onefold")

Decided = TypeVar("Decided", bound=Outcome)


class DeadNotice(msgspec.Struct, frozen=True, kw_only=True):
    """The argument of a hook for dead letters; the letter itself is found by the id."""

    message_id: str
    message_type: str
    queue: str
    #: As in the letter: ``attempts exhausted``, ``rejected``, ``quarantined`` …
    reason: str
    error_type: str
    error_message: str
    attempt: int
    #: Tells the notices of one message apart: a letter that is redriven and dies again has another fence.
    fence: int


def announced(lease: Lease, outcome: Decided, registry: Registry, prepare: Prepare) -> Decided:
    """Return the outcome of a message, for a dead letter with the messages to the hooks.

    A hook that cannot be called does not keep the letter from being written.  A hook's own letters have no notices,
    because a hook that always fails would send itself notices for ever.
    """
    if not isinstance(outcome, Dead) or not registry.hooks or lease.envelope.message_type in registry.hooks:
        return outcome
    envelope, failure = lease.envelope, outcome.failure
    notice = DeadNotice(
        message_id=envelope.id,
        message_type=envelope.message_type,
        queue=envelope.queue,
        reason=failure.reason,
        error_type=failure.error_type,
        error_message=failure.error_message,
        attempt=lease.attempt,
        fence=lease.fence,
    )
    key = derived_key("dead", f"{envelope.id}:{lease.fence}")
    try:
        calls = [replace(hook.call(notice), key=key) for hook in registry.hooks.values()]
        sends = [prepare(call, envelope, 0)[0] for call in calls]
    except Exception as error:
        logger.warning("dead_letter_not_told message_id=%s error=%s", envelope.id, type(error).__name__)
        return outcome
    return replace(outcome, sends=tuple(sends))
