"""All errors, and the three instructions that a handler may raise.

::

    OnefoldError                     base of all
    ├── ConfigurationError           a wrong declaration or setting; nothing ran, the message names the remedy
    │   ├── SchemaError              the database lacks migrations, has newer ones, or is not onefold's
    │   └── SecondLibraryError       two SQLite libraries of one process on one file
    ├── EnvelopeError                an invalid message; names the field
    │   ├── DecodeError              bytes that cannot be read; a retry would not help
    │   │   └── UnknownArgumentError an argument that this version of the code does not have; a newer one may
    │   ├── KeyMismatchError         a message from a broker has another key than its task makes of its arguments
    │   └── LimitError               larger, longer, deeper or more than allowed; names the limit
    ├── KeyReuseError                the same key was sent with another payload
    ├── StoreError                   the store could not do it
    │   ├── StoreUnavailableError    not now; nothing was half-written, trying again is safe
    │   │   ├── CommitUnknownError   the connection was lost during COMMIT: all of it was written, or nothing
    │   │   ├── StoreConflictError   a deadlock with another transaction, and this one lost; nothing was written
    │   │   └── SessionLostError     the session ended during a statement of the caller; nothing was written
    │   ├── StoreReplacedError       the database file was moved or replaced under the running store
    │   ├── LeaseLostError           another worker owns the message now; nothing was written
    │   ├── TransactionOpenError     the call would commit apart from the open transaction, or end it
    │   ├── TransactionEndedError    the code inside a transaction ended it; a part may be committed
    │   └── ReadTooLongError         a read of the caller took too long and was interrupted
    ├── TransportError               a broker could not do it
    │   └── TransportUnavailableError  not now; the entry may have been published, publishing again is safe
    ├── HandlerError                 a handler broke its contract
    │   ├── TransactionTooLongError  the handler's transaction stayed open past its limit and was ended
    │   ├── HandlerTimeoutError      the handler did not end in its time
    │   ├── UnreadableSignalError    a signal has another type than the run waits for; an operator drops or replaces it
    │   ├── UncertainError           whether an effect happened is unknown; an operator must say
    │   ├── StepLimitError           a run asks for more steps than allowed; parked until it is resumed with more
    │   └── ReplayError              a workflow's code and its journal differ
    ├── SequenceGapError             an earlier number of its ordering key is missing
    ├── StepError                    a step of a workflow failed for good; carries the failure
    ├── SignalError                  a signal reached no run: none has that id, or the one with the key has ended
    ├── SignalTimeoutError           the awaited signal did not come in the time given
    ├── DeadError                    the awaited message is a dead letter; carries the failure
    │   └── SagaError                the awaited saga failed and was undone; carries the failure
    ├── CancelledMessageError        the awaited message was cancelled or discarded
    ├── RestartError                 a run cannot be restarted from that step now; says why and what to do
    ├── RetentionOverError           the time in which a dead letter can be redriven is over
    └── ResultTimeoutError           no outcome came in the time given

    Retry(after=…)    run again later, counted as an attempt
    Snooze(after=…)   run again later, not counted
    Reject(reason)    never run again

The names of errors end in ``Error``, those of instructions do not.
A driver's exception never leaves a store or transport: it is the ``__cause__`` of one of these.
"""

from __future__ import annotations

import math
from datetime import timedelta


class OnefoldError(Exception):
    """Base of every error onefold raises."""


class ConfigurationError(OnefoldError):
    """A declaration or setting is wrong; nothing has run yet, and the message names the remedy."""


class SchemaError(ConfigurationError):
    """This version must not write to the database; the message names the command or the remedy."""


class SecondLibraryError(ConfigurationError):
    """A second SQLite library of this process was refused a database file; the message names the remedy."""


class EnvelopeError(OnefoldError):
    """A message is invalid.  ``field`` names the part that is."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class DecodeError(EnvelopeError):
    """Bytes that cannot be decoded as the type that is expected; trying again would not help."""


class UnknownArgumentError(DecodeError):
    """A message has an argument, or a field in one, that this version of its handler does not have.

    A newer version of the code may have sent it, so a worker leaves it to a newer one without using up an attempt.
    """


class LimitError(EnvelopeError):
    """A limit was exceeded; the message names the field, the limit and the remedy."""


class KeyMismatchError(EnvelopeError):
    """A message from a broker has another key than its task makes from its arguments."""

    def __init__(self, message_type: str, key: str, made: str) -> None:
        super().__init__(
            "idempotency_key",
            f"is {key!r}, but {message_type} makes {made!r} from these arguments; send that one, or the message's id",
        )
        self.message_type = message_type
        self.key = key
        self.made = made


class KeyReuseError(OnefoldError):
    """The key already belongs to a message with another payload; nothing was stored."""

    def __init__(self, message_type: str, key: str, first_id: str) -> None:
        super().__init__(
            f"{message_type}: idempotency key {key!r} belongs to message {first_id}, which has another payload; "
            "send the same arguments, or use another key"
        )
        self.message_type = message_type
        self.key = key
        self.first_id = first_id


class StoreError(OnefoldError):
    """The store could not carry out a call."""


class StoreUnavailableError(StoreError):
    """The store cannot be reached, is busy or is full.  Nothing was half-written; trying again is safe."""


class CommitUnknownError(StoreUnavailableError):
    """The connection was lost during COMMIT; all of the transaction was written, or nothing."""


class StoreReplacedError(StoreError):
    """The database file or its log was moved or replaced after it was opened; the last commits may be lost."""


class StoreConflictError(StoreUnavailableError):
    """Another transaction locked the same rows in another order, and this one lost.  Nothing was written."""


class SessionLostError(StoreUnavailableError):
    """The database session ended while a statement of the caller ran.  Nothing was committed.

    The server may have restarted, or the statement may have ended its session: a message whose statements do so
    repeatedly is quarantined, like one that kills its process.
    """


class LeaseLostError(StoreError):
    """Another worker took the message over; everything in this transaction was rolled back."""


class TransactionOpenError(StoreError):
    """The call would commit apart from the open transaction, or end it; it was not carried out."""


class TransactionEndedError(StoreError):
    """The code inside a transaction ended it, so that a part of it may be committed without the rest.

    A handler's message becomes a dead letter at once, because another run would repeat the committed part.
    """


class ReadTooLongError(StoreError):
    """A read of the caller on SQLite took longer than its limit and was interrupted."""


class TransportError(OnefoldError):
    """A broker could not carry out a call."""


class TransportUnavailableError(TransportError):
    """A broker cannot be reached, or accepts nothing now.

    The entry may have been published.  Publishing it again is safe, because receivers recognise duplicates by the key.
    """


class HandlerError(OnefoldError):
    """A handler broke its contract."""


class TransactionTooLongError(HandlerError):
    """The handler's transaction stayed open past its limit and was rolled back."""


class HandlerTimeoutError(HandlerError):
    """The handler ran past its timeout; in a thread also past its lease, or past a graceful stop."""


class UncertainError(HandlerError):
    """An effect was begun and its outcome is unknown; the message is parked until an operator says what happened."""

    def __init__(self, message_id: str, name: str, why: str) -> None:
        super().__init__(
            f"message {message_id}: whether {name!r} happened is unknown, {why}; find out and call app.resolve()"
        )
        self.message_id = message_id
        self.name = name


class StepLimitError(HandlerError):
    """A run asks for more steps than its workflow allows; it is parked with its journal."""

    def __init__(self, run_id: str, most: int) -> None:
        super().__init__(
            f"run {run_id}: steps: it asks for more than {most}; move parts of the work into children, or declare the "
            "workflow with a larger max_steps= and resume the run"
        )
        self.run_id = run_id
        self.most = most


class UnreadableSignalError(HandlerError):
    """A signal has another type than the run waits for; the run is parked, and the signal stays unread."""

    def __init__(self, run_id: str, name: str, signal_id: str, problem: str) -> None:
        super().__init__(
            f"run {run_id}: its signal {name!r} with the id {signal_id!r} cannot be read ({problem}); "
            "call app.drop_signal() or app.replace_signal()"
        )
        self.run_id = run_id
        self.name = name
        self.signal_id = signal_id


class ReplayError(HandlerError):
    """A workflow's code and its journal differ; the run is parked, and nothing was changed."""

    def __init__(self, run_id: str, *, code: str, journal: str) -> None:
        super().__init__(
            f"run {run_id}: the code says {code}, its journal says {journal}; "
            "keep the code that began the run until it has finished, under its own version="
        )
        self.run_id = run_id
        self.code = code
        self.journal = journal


class SequenceGapError(OnefoldError):
    """A message with a lower sequence number of the same ordering key is missing; this one did not run."""

    def __init__(self, message_id: str, ordering_key: str, sequence: int) -> None:
        super().__init__(
            f"message {message_id}: sequence: a number before {sequence} of the ordering key {ordering_key!r} is "
            "missing; send that message and redrive this one, or declare the task with gap='skip'"
        )
        self.message_id = message_id
        self.ordering_key = ordering_key
        self.sequence = sequence


class StepError(OnefoldError):
    """A step failed for good.  It is raised again on every replay, so a workflow may catch it and go on."""

    def __init__(self, step: str, reason: str, error_type: str, error_message: str) -> None:
        super().__init__(f"step {step} failed ({reason}): {error_type}: {error_message}")
        self.step = step
        self.reason = reason
        self.error_type = error_type
        self.error_message = error_message


class SignalError(OnefoldError):
    """A signal reached no run.  Nothing was written; inside a handler or transaction its whole commit is undone."""

    def __init__(self, run_id: str, name: str, why: str) -> None:
        super().__init__(f"signal {name!r} reached no run: {why}")
        self.run_id = run_id
        self.name = name

    @classmethod
    def unknown(cls, run_id: str, name: str) -> SignalError:
        """Return the error for an id that the store does not have."""
        return cls(
            run_id, name, f"the store has no run with the id {run_id!r}; use the id of a receipt, after its commit"
        )

    @classmethod
    def ended(cls, run_id: str, name: str) -> SignalError:
        """Return the error for a key whose run has ended: it takes no signals and cannot be started again."""
        return cls(run_id, name, f"the key belongs to run {run_id}, which has ended; use another key for new work")


class SignalTimeoutError(OnefoldError):
    """The awaited signal did not come in the time given; the next wait gets one that comes later."""


class DeadError(OnefoldError):
    """The awaited message is a dead letter."""

    def __init__(self, message_id: str, reason: str, error_type: str, error_message: str) -> None:
        super().__init__(f"message {message_id} is dead ({reason}): {error_type}: {error_message}")
        self.message_id = message_id
        self.reason = reason
        self.error_type = error_type
        self.error_message = error_message


class SagaError(DeadError):
    """The awaited saga failed, and all of its steps were undone; carries the failure."""


class CancelledMessageError(OnefoldError):
    """The awaited message was cancelled or discarded, so it has no result."""


class RestartError(OnefoldError):
    """A run cannot be restarted from that step safely; nothing was changed."""

    def __init__(self, run_id: str, why: str, remedy: str) -> None:
        super().__init__(f"run {run_id} cannot be restarted: {why}; {remedy}")
        self.run_id = run_id


class RetentionOverError(OnefoldError):
    """The time in which a dead letter can be redriven is over; nothing was changed."""

    def __init__(self, message_id: str, until: str | None) -> None:
        why = "its body is no longer kept" if until is None else f"it could be redriven until {until}"
        super().__init__(f"dead letter {message_id}: {why}; discard it and send the message again")
        self.message_id = message_id


class ResultTimeoutError(OnefoldError):
    """The awaited message had no outcome in the time given; it has not ended."""


class Retry(Exception):  # noqa: N818 - an instruction, not an error
    """Raised by a handler: run again ``after`` this long, counted as an attempt."""

    def __init__(
        self, reason: str = "the handler asked for a retry", *, after: timedelta | float | None = None
    ) -> None:
        super().__init__(reason)
        self.after_seconds = None if after is None else seconds(after, "after")


class Snooze(Exception):  # noqa: N818 - an instruction, not an error
    """Raised by a handler: run again ``after`` this long without counting an attempt, until the message expires."""

    def __init__(self, *, after: timedelta | float, reason: str = "the handler snoozed") -> None:
        super().__init__(reason)
        self.after_seconds = seconds(after, "after")


class Reject(Exception):  # noqa: N818 - an instruction, not an error
    """Raised by a handler: this message can never succeed; make it a dead letter now."""


#: The longest duration that is accepted, a hundred years.  Its microseconds are exact in a double, and added to any
#: instant that a message may name they end before the year 9999, where dates end.  It is defined here, and not in
#: ``limits``, because two of the instructions above are checked by it and ``limits`` imports this module.
DURATION_SECONDS_MAX = 36_525 * 86_400.0


def seconds(duration: timedelta | float, name: str = "a duration") -> float:
    """Turn a user's duration into seconds, or refuse it.

    Every duration that a user gives comes through here, so that one that no store or date can hold is refused at the
    call and not when the message is settled.
    """
    # Not ``isinstance`` with ``typing.SupportsFloat``: a check of a protocol took a third of a run's time.
    if isinstance(duration, bool) or not (isinstance(duration, timedelta) or hasattr(duration, "__float__")):
        kind = type(duration).__name__
        raise ConfigurationError(
            f"{name} is a {kind}; write a number of seconds, or a timedelta such as timedelta(days=1)"
        )
    try:
        value = duration.total_seconds() if isinstance(duration, timedelta) else float(duration)
    except OverflowError:  # a whole number that no float holds
        value = math.inf
    if not 0 <= value < math.inf:
        raise ConfigurationError(f"{name} must be finite and not negative, not {str(duration)[:40]}")
    if value > DURATION_SECONDS_MAX:
        raise ConfigurationError(
            f"{name} is {value:g} s; at most {DURATION_SECONDS_MAX:g} s, a hundred years, are allowed; write less"
        )
    return value
