"""onefold: durable tasks and messages, delivered at least once, whose effect happens once."""

from onefold.app import App
from onefold.envelope import Envelope
from onefold.errors import (
    CancelledMessageError,
    ConfigurationError,
    DeadError,
    DecodeError,
    EnvelopeError,
    HandlerError,
    HandlerTimeoutError,
    KeyReuseError,
    LeaseLostError,
    LimitError,
    OnefoldError,
    Reject,
    ResultTimeoutError,
    Retry,
    SchemaError,
    Snooze,
    StoreError,
    StoreUnavailableError,
    TransactionOpenError,
    TransactionTooLongError,
)
from onefold.inspection import DeadLetter
from onefold.receipt import Receipt
from onefold.registry import Call, Task
from onefold.retry import RetryPolicy
from onefold.store import Query, Record, State
from onefold.transaction import AppTransaction, Context
from onefold.version import __version__

__all__ = [
    "App",
    "AppTransaction",
    "Call",
    "CancelledMessageError",
    "ConfigurationError",
    "Context",
    "DeadError",
    "DeadLetter",
    "DecodeError",
    "Envelope",
    "EnvelopeError",
    "HandlerError",
    "HandlerTimeoutError",
    "KeyReuseError",
    "LeaseLostError",
    "LimitError",
    "OnefoldError",
    "Query",
    "Receipt",
    "Record",
    "Reject",
    "ResultTimeoutError",
    "Retry",
    "RetryPolicy",
    "SchemaError",
    "Snooze",
    "State",
    "StoreError",
    "StoreUnavailableError",
    "Task",
    "TransactionOpenError",
    "TransactionTooLongError",
    "__version__",
]
