"""onefold: durable tasks and messages, delivered at least once, whose effect happens once.

Public names are imported when they are first used, so that a command starts quickly and a program loads only the parts
that it needs.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

# First, so that nothing is logged before it.
from onefold import logs as _logs  # noqa: F401  isort: skip

if TYPE_CHECKING:
    from onefold.app import App
    from onefold.brokers.transport import Delivery, Transport, TransportCapabilities
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
        RestartError,
        ResultTimeoutError,
        RetentionOverError,
        Retry,
        SagaError,
        SchemaError,
        SecondLibraryError,
        SequenceGapError,
        SessionLostError,
        SignalError,
        SignalTimeoutError,
        Snooze,
        StepError,
        StepLimitError,
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
        UnknownArgumentError,
        UnreadableSignalError,
    )
    from onefold.events.subscriptions import Subscription
    from onefold.events.topic import Topic
    from onefold.handlers.batch import Batch, Item, SyncBatch
    from onefold.handlers.context import Context
    from onefold.handlers.effects import Happened, LedgerEntry, NotHappened
    from onefold.handlers.sync_context import SyncContext
    from onefold.message.envelope import Envelope
    from onefold.operations.chain import Chain, ChainNode
    from onefold.operations.dead_letters import DeadGroup, DeadLetter
    from onefold.operations.history import Chronicle
    from onefold.schedules.debounce import Debounced
    from onefold.schedules.register import Schedule
    from onefold.store import Progress, Query, Record, State
    from onefold.store.gates import Rate
    from onefold.sync import SyncApp
    from onefold.sync.objects import (
        SyncDeadLetter,
        SyncDebounced,
        SyncReceipt,
        SyncSchedule,
        SyncTask,
        SyncTopic,
        SyncTransaction,
    )
    from onefold.tasks.receipt import Receipt
    from onefold.tasks.retry import RetryPolicy
    from onefold.tasks.task import Call, Task
    from onefold.transactions.app_transaction import AppTransaction
    from onefold.version import __version__
    from onefold.worker.dead_notice import DeadNotice
    from onefold.workflows.saga import Saga
    from onefold.workflows.saga_status import SagaRecord, SagaStatus, SagaStep, StepStatus
    from onefold.workflows.steps import Never, never
    from onefold.workflows.workflow import Run, Workflow

__all__ = [
    "App",
    "AppTransaction",
    "Batch",
    "Call",
    "CancelledMessageError",
    "Chain",
    "ChainNode",
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
    "RestartError",
    "ResultTimeoutError",
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
    "SignalError",
    "SignalTimeoutError",
    "Snooze",
    "State",
    "StepError",
    "StepLimitError",
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
    "UnknownArgumentError",
    "UnreadableSignalError",
    "Workflow",
    "__version__",
    "never",
]

#: Where each public name is defined; the imports above say the same to type checkers, and a test compares the two.
_MODULES = {
    "onefold.app": ("App",),
    "onefold.brokers.transport": ("Delivery", "Transport", "TransportCapabilities"),
    "onefold.errors": (
        "CancelledMessageError",
        "CommitUnknownError",
        "ConfigurationError",
        "DeadError",
        "DecodeError",
        "EnvelopeError",
        "HandlerError",
        "HandlerTimeoutError",
        "KeyMismatchError",
        "KeyReuseError",
        "LeaseLostError",
        "LimitError",
        "OnefoldError",
        "ReadTooLongError",
        "Reject",
        "ReplayError",
        "RestartError",
        "ResultTimeoutError",
        "RetentionOverError",
        "Retry",
        "SagaError",
        "SchemaError",
        "SecondLibraryError",
        "SequenceGapError",
        "SessionLostError",
        "SignalError",
        "SignalTimeoutError",
        "Snooze",
        "StepError",
        "StepLimitError",
        "StoreConflictError",
        "StoreError",
        "StoreReplacedError",
        "StoreUnavailableError",
        "TransactionEndedError",
        "TransactionOpenError",
        "TransactionTooLongError",
        "TransportError",
        "TransportUnavailableError",
        "UncertainError",
        "UnknownArgumentError",
        "UnreadableSignalError",
    ),
    "onefold.events.subscriptions": ("Subscription",),
    "onefold.events.topic": ("Topic",),
    "onefold.handlers.batch": ("Batch", "Item", "SyncBatch"),
    "onefold.handlers.context": ("Context",),
    "onefold.handlers.effects": ("Happened", "LedgerEntry", "NotHappened"),
    "onefold.handlers.sync_context": ("SyncContext",),
    "onefold.message.envelope": ("Envelope",),
    "onefold.operations.chain": ("Chain", "ChainNode"),
    "onefold.operations.dead_letters": ("DeadGroup", "DeadLetter"),
    "onefold.operations.history": ("Chronicle",),
    "onefold.schedules.debounce": ("Debounced",),
    "onefold.schedules.register": ("Schedule",),
    "onefold.store": ("Progress", "Query", "Record", "State"),
    "onefold.store.gates": ("Rate",),
    "onefold.sync": ("SyncApp",),
    "onefold.sync.objects": (
        "SyncDeadLetter",
        "SyncDebounced",
        "SyncReceipt",
        "SyncSchedule",
        "SyncTask",
        "SyncTopic",
        "SyncTransaction",
    ),
    "onefold.tasks.receipt": ("Receipt",),
    "onefold.tasks.retry": ("RetryPolicy",),
    "onefold.tasks.task": ("Call", "Task"),
    "onefold.transactions.app_transaction": ("AppTransaction",),
    "onefold.version": ("__version__",),
    "onefold.worker.dead_notice": ("DeadNotice",),
    "onefold.workflows.saga": ("Saga",),
    "onefold.workflows.saga_status": ("SagaRecord", "SagaStatus", "SagaStep", "StepStatus"),
    "onefold.workflows.steps": ("Never", "never"),
    "onefold.workflows.workflow": ("Run", "Workflow"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


if not TYPE_CHECKING:  # to a type checker it would say that every name exists

    def __getattr__(name: str) -> object:
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(_import_module(_MODULE_OF[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
