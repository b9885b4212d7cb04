"""onefold: durable tasks and messages, delivered at least once, whose effect happens once."""

# First, so that nothing is logged before it.
from onefold import logs as _logs  # noqa: F401  isort: skip
from onefold.announcing import DeadNotice
from onefold.app import App
from onefold.batch import Batch, Item, SyncBatch
from onefold.blocking import SyncContext
from onefold.chain import Chain, Link
from onefold.chronicle import Chronicle
from onefold.context import Context
from onefold.debounce import Debounced
from onefold.effects import Happened, LedgerEntry, NotHappened
from onefold.envelope import Envelope
from onefold.errors import (
    CancelledMessageError,
    CommitUnknownError,
    ConfigurationError,
    DeadError,
    DecodeError,
    EnvelopeError,
    HandlerError,
    HandlerTimeoutError,
    KeyMismatchError,
    KeyReuseError,
    LeaseLostError,
    LimitError,
    OnefoldError,
    ReadTooLongError,
    Reject,
    ReplayError,
    ResultTimeoutError,
    RestartError,
    RetentionOverError,
    Retry,
    SagaError,
    SchemaError,
    SecondLibraryError,
    SequenceGapError,
    SessionLostError,
    SignalTimeoutError,
    Snooze,
    StepError,
    StoreConflictError,
    StoreError,
    StoreReplacedError,
    StoreUnavailableError,
    TransactionEndedError,
    TransactionOpenError,
    TransactionTooLongError,
    TransportError,
    TransportUnavailableError,
    UncertainError,
)
from onefold.gate import Rate
from onefold.inspection import DeadGroup, DeadLetter
from onefold.receipt import Receipt
from onefold.recurring import Schedule
from onefold.retry import RetryPolicy
from onefold.saga import Saga
from onefold.status import SagaRecord, SagaStatus, SagaStep, StepStatus
from onefold.store import Progress, Query, Record, State
from onefold.subscription import Subscription
from onefold.sync import SyncApp
from onefold.task import Call, Task
from onefold.topic import Topic
from onefold.transaction import AppTransaction
from onefold.transport import Delivery, Transport, TransportCapabilities
from onefold.undo import Never, never
from onefold.version import __version__
from onefold.waiting import (
    SyncDeadLetter,
    SyncDebounced,
    SyncReceipt,
    SyncSchedule,
    SyncTask,
    SyncTopic,
    SyncTransaction,
)
from onefold.workflow import Run, Workflow

__all__ = [
    "App",
    "AppTransaction",
    "Batch",
    "Call",
    "CancelledMessageError",
    "Chain",
    "Chronicle",
    "CommitUnknownError",
    "ConfigurationError",
    "Context",
    "DeadError",
    "DeadGroup",
    "DeadLetter",
    "DeadNotice",
    "Debounced",
    "DecodeError",
    "Delivery",
    "Envelope",
    "EnvelopeError",
    "HandlerError",
    "HandlerTimeoutError",
    "Happened",
    "Item",
    "KeyMismatchError",
    "KeyReuseError",
    "LeaseLostError",
    "LedgerEntry",
    "LimitError",
    "Link",
    "Never",
    "NotHappened",
    "OnefoldError",
    "Progress",
    "Query",
    "Rate",
    "ReadTooLongError",
    "Receipt",
    "Record",
    "Reject",
    "ReplayError",
    "ResultTimeoutError",
    "RestartError",
    "RetentionOverError",
    "Retry",
    "RetryPolicy",
    "Run",
    "Saga",
    "SagaError",
    "SagaRecord",
    "SagaStatus",
    "SagaStep",
    "Schedule",
    "SchemaError",
    "SecondLibraryError",
    "SequenceGapError",
    "SessionLostError",
    "SignalTimeoutError",
    "Snooze",
    "State",
    "StepError",
    "StepStatus",
    "StoreConflictError",
    "StoreError",
    "StoreReplacedError",
    "StoreUnavailableError",
    "Subscription",
    "SyncApp",
    "SyncBatch",
    "SyncContext",
    "SyncDeadLetter",
    "SyncDebounced",
    "SyncReceipt",
    "SyncSchedule",
    "SyncTask",
    "SyncTopic",
    "SyncTransaction",
    "Task",
    "Topic",
    "TransactionEndedError",
    "TransactionOpenError",
    "TransactionTooLongError",
    "Transport",
    "TransportCapabilities",
    "TransportError",
    "TransportUnavailableError",
    "UncertainError",
    "Workflow",
    "__version__",
    "never",
]
