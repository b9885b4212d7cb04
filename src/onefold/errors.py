"""Everything that can go wrong, and the three instructions a handler may raise.

::

    OnefoldError                     base of all
    ├── ConfigurationError           wrong before anything ran; the message names the remedy
    │   ├── SchemaError              migrations missing, foreign or from the future
    │   └── SecondLibraryError       two SQLite libraries of one process on one file
    ├── EnvelopeError                a message that may not travel; names the field
    │   ├── DecodeError              bytes that cannot be read; a retry would not help
    │   ├── KeyMismatchError         from a broker with another key than its task makes of its arguments
    │   └── LimitError               larger, longer, deeper or more than allowed; names the limit
    ├── KeyReuseError                the same key was sent with another payload
    ├── StoreError                   the store refused
    │   ├── StoreUnavailableError    it may work later; nothing was half-written
    │   │   ├── CommitUnknownError   all of the transaction happened, or nothing; nobody can be asked which
    │   │   ├── StoreConflictError   another transaction wanted the same rows in another order, and this one lost
    │   │   └── SessionLostError     the session ended under the caller's own statement; nothing was written
    │   ├── StoreReplacedError       the database file was moved or replaced under the running store
    │   ├── LeaseLostError           somebody else owns the message now; nothing was written
    │   ├── TransactionOpenError     this would commit apart from the open transaction, or end it
    │   ├── TransactionEndedError    the code inside a transaction ended it by itself; a part may be committed
    │   └── ReadTooLongError         a read of the caller's took longer than it may, and was interrupted
    ├── TransportError               a broker refused
    │   └── TransportUnavailableError  it may work later; what was to be published may be published
    ├── HandlerError                 a handler broke its contract
    │   ├── TransactionTooLongError  the handler's transaction stayed open past its limit and was ended
    │   ├── HandlerTimeoutError      the handler's time is up
    │   ├── UncertainError           nobody knows whether an effect happened; a person must say
    │   └── ReplayError              a workflow's code and its journal differ
    ├── SequenceGapError             an earlier number of its ordering key is missing
    ├── StepError                    a step of a workflow failed for good; carries the failure
    ├── SignalTimeoutError           the awaited signal did not come in the time given
    ├── DeadError                    the awaited message is a dead letter; carries the failure
    │   └── SagaError                the awaited saga failed and was undone
    ├── CancelledMessageError        the awaited message was cancelled or discarded
    ├── RestartError                 a run cannot go back to that step now; says why and what to do
    ├── RetentionOverError           a dead letter was kept for too long to be redriven
    └── ResultTimeoutError           no outcome came in the time given

    Retry(after=…)    try again later, counted as an attempt
    Snooze(after=…)   try again later, not counted
    Reject(reason)    never try again

Something that went wrong ends in ``Error``; an instruction does not.
A driver's exception never crosses the seam of a store or transport: it is chained to one of these.
"""

from __future__ import annotations

import math
from datetime import timedelta
from typing import SupportsFloat


class OnefoldError(Exception):
    """Base of every error onefold raises."""


class ConfigurationError(OnefoldError):
    """Something was declared or configured wrongly; nothing has run yet."""


class SchemaError(ConfigurationError):
    """The database is not one this version may write to; the message names the command or the remedy."""


class SecondLibraryError(ConfigurationError):
    """A second SQLite library of this process was kept away from a database file; the message names the remedy."""


class EnvelopeError(OnefoldError):
    """A message breaks the contract.  ``field`` names the part that does."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class DecodeError(EnvelopeError):
    """Bytes that cannot be read as what they claim to be; trying again would not help."""


class LimitError(EnvelopeError):
    """A limit was passed; the message names the field, the limit and the remedy."""


class KeyMismatchError(EnvelopeError):
    """A message from a broker has another key than its task makes from its arguments."""

    def __init__(self, message_type: str, key: str, made: str) -> None:
        super().__init__(
            "idempotency_key",
            f"is {key!r}, but {message_type} makes {made!r} from these arguments; send that, or the message's id",
        )
        self.message_type = message_type
        self.key = key
        self.made = made


class KeyReuseError(OnefoldError):
    """The key already belongs to a message with another payload; nothing was stored."""

    def __init__(self, message_type: str, key: str, first_id: str) -> None:
        super().__init__(
            f"{message_type}: idempotency key {key!r} belongs to message {first_id}, which has another payload; "
            "send the same arguments, or use a key that tells the two apart"
        )
        self.message_type = message_type
        self.key = key
        self.first_id = first_id


class StoreError(OnefoldError):
    """The store could not do what it was asked."""


class StoreUnavailableError(StoreError):
    """The store cannot be reached, is busy or is full.  Nothing was half-written; trying again is safe."""


class CommitUnknownError(StoreUnavailableError):
    """The connection was lost during COMMIT, and the store cannot be asked what became of it: all of it, or nothing."""


class StoreReplacedError(StoreError):
    """The database file, or its log, is not the one that was opened; what was written last may be lost."""


class StoreConflictError(StoreUnavailableError):
    """Another transaction wanted the same rows in another order, and this one lost.  Nothing was written."""


class SessionLostError(StoreUnavailableError):
    """The database session ended while a statement of the caller's own ran.  Nothing was committed.

    The server may have restarted, or the statement may have ended its session: a message whose statements do so again
    and again is quarantined, as one that kills its process.
    """


class LeaseLostError(StoreError):
    """The lease was taken over; everything in this transaction was rolled back."""


class TransactionOpenError(StoreError):
    """Something that commits by itself, or would end the transaction, was used while one is open; it was not done."""


class TransactionEndedError(StoreError):
    """The code inside a transaction ended it by itself, so that a part of it may be committed without the rest.

    A handler's message becomes a dead letter at once: another run would repeat what was committed.
    """


class ReadTooLongError(StoreError):
    """A read of the caller's took longer than it may on SQLite, and was interrupted."""


class TransportError(OnefoldError):
    """A broker could not do what it was asked."""


class TransportUnavailableError(TransportError):
    """A broker cannot be reached, or takes nothing now.  Publishing again is safe: receivers know what they have."""


class HandlerError(OnefoldError):
    """A handler broke its contract."""


class TransactionTooLongError(HandlerError):
    """The handler's transaction stayed open past its limit and was rolled back."""


class HandlerTimeoutError(HandlerError):
    """The handler's time is up: past its timeout; in a thread also past its lease, or past a graceful stop."""


class UncertainError(HandlerError):
    """An effect was begun, its outcome is unknown, and nothing but a person can tell; the message is parked."""

    def __init__(self, message_id: str, name: str, why: str) -> None:
        super().__init__(f"message {message_id}: whether {name!r} happened is unknown, {why}; see app.resolve()")
        self.message_id = message_id
        self.name = name


class ReplayError(HandlerError):
    """A workflow's code no longer does what its journal says it did; the run is parked, and nothing was changed."""

    def __init__(self, run_id: str, *, code: str, journal: str) -> None:
        super().__init__(
            f"run {run_id}: the code says {code}, its journal says {journal}; "
            "let the code that began it finish it, under its own version="
        )
        self.run_id = run_id
        self.code = code
        self.journal = journal


class SequenceGapError(OnefoldError):
    """A message came although one with a lower number of the same ordering key is missing; it did not run."""

    def __init__(self, message_id: str, ordering_key: str, sequence: int) -> None:
        super().__init__(
            f"message {message_id}: a number before {sequence} of the ordering key {ordering_key!r} is missing; "
            "send that one and redrive this one, or let its task say gap='skip'"
        )
        self.message_id = message_id
        self.ordering_key = ordering_key
        self.sequence = sequence


class StepError(OnefoldError):
    """A step failed for good.  The same on every replay, so a workflow may catch it and go another way."""

    def __init__(self, step: str, reason: str, error_type: str, error_message: str) -> None:
        super().__init__(f"step {step} failed ({reason}): {error_type}: {error_message}")
        self.step = step
        self.reason = reason
        self.error_type = error_type
        self.error_message = error_message


class SignalTimeoutError(OnefoldError):
    """The awaited signal did not come in the time given; one that comes later is for the next wait."""


class DeadError(OnefoldError):
    """The awaited message is a dead letter."""

    def __init__(self, message_id: str, reason: str, error_type: str, error_message: str) -> None:
        super().__init__(f"message {message_id} is dead ({reason}): {error_type}: {error_message}")
        self.message_id = message_id
        self.reason = reason
        self.error_type = error_type
        self.error_message = error_message


class SagaError(DeadError):
    """The awaited saga failed, and everything it had done was undone; carries what it failed with."""


class CancelledMessageError(OnefoldError):
    """The awaited message was cancelled or discarded, so it has no result."""


class RestartError(OnefoldError):
    """A run cannot go back to that step without harm; nothing was changed."""

    def __init__(self, run_id: str, why: str, remedy: str) -> None:
        super().__init__(f"run {run_id} cannot be restarted: {why}; {remedy}")
        self.run_id = run_id


class RetentionOverError(OnefoldError):
    """A dead letter cannot be redriven any more: its time is over; nothing was changed."""

    def __init__(self, message_id: str, until: str | None) -> None:
        told = "its body is no longer kept" if until is None else f"it could be redriven until {until}"
        super().__init__(f"dead letter {message_id}: {told}; discard it and send it anew")
        self.message_id = message_id


class ResultTimeoutError(OnefoldError):
    """The awaited message had no outcome in the time given; it is still alive."""


class Retry(Exception):  # noqa: N818 - an instruction, not an error
    """Raised by a handler: try again ``after`` this long, counted as an attempt."""

    def __init__(
        self, reason: str = "the handler asked for a retry", *, after: timedelta | float | None = None
    ) -> None:
        super().__init__(reason)
        self.after_seconds = None if after is None else seconds(after)


class Snooze(Exception):  # noqa: N818 - an instruction, not an error
    """Raised by a handler: try again ``after`` this long without counting an attempt, until the message expires."""

    def __init__(self, *, after: timedelta | float, reason: str = "the handler snoozed") -> None:
        super().__init__(reason)
        self.after_seconds = seconds(after)


class Reject(Exception):  # noqa: N818 - an instruction, not an error
    """Raised by a handler: this message can never succeed; make it a dead letter now."""


def seconds(duration: timedelta | float, name: str = "a duration") -> float:
    """Turn a duration as users write it into seconds; negative ones, texts and truth values are refused."""
    if isinstance(duration, bool) or not isinstance(duration, SupportsFloat | timedelta):
        kind = type(duration).__name__
        raise ConfigurationError(
            f"{name} is a {kind}; write a number of seconds, or a timedelta such as timedelta(days=1)"
        )
    value = duration.total_seconds() if isinstance(duration, timedelta) else float(duration)
    if not 0 <= value < math.inf:
        raise ConfigurationError(f"{name} must be finite and not negative, not {duration!r}")
    return value
