"""The public names: a change of this list is a change of the interface."""

from __future__ import annotations

import inspect
import re

import onefold
from onefold import errors


def test_the_public_names_are_these_and_sorted() -> None:
    """P1: no name appears or disappears by accident."""
    assert onefold.__all__ == [
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
    assert onefold.__all__ == sorted(onefold.__all__)


def test_every_public_name_exists_and_has_a_docstring() -> None:
    """P7."""
    for name in onefold.__all__:
        assert hasattr(onefold, name)
        if name != "__version__":
            assert inspect.getdoc(getattr(onefold, name))


def exceptions() -> dict[str, type[Exception]]:
    found = inspect.getmembers(errors, inspect.isclass)
    return {name: kind for name, kind in found if issubclass(kind, Exception) and kind.__module__ == errors.__name__}


def test_every_exception_is_public() -> None:
    """P3: a caller that must catch it can import it from the package."""
    assert exceptions().keys() <= set(onefold.__all__)


def test_the_tree_in_the_docstring_is_the_tree_of_the_classes() -> None:
    """P7: the drawing in the module's docstring, with its indentation."""
    drawn: dict[str, str] = {}
    parents: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        if found := re.match(r"    ([│├└─ ]*)(\w+Error)\b", line):
            depth = len(found.group(1)) // 4
            parents[depth:] = [found.group(2)]
            drawn[found.group(2)] = parents[depth - 1] if depth else "Exception"
    assert drawn == {name: kind.__bases__[0].__name__ for name, kind in exceptions().items() if name.endswith("Error")}


def test_the_instructions_are_in_the_docstring_and_are_no_errors() -> None:
    """C9: exceptions that a handler raises as instructions are not caught as errors of the library."""
    instructions = {name for name in exceptions() if not name.endswith("Error")}
    assert instructions == set(re.findall(r"^    (\w+)\(", errors.__doc__ or "", re.MULTILINE))
    assert not any(issubclass(exceptions()[name], errors.OnefoldError) for name in instructions)
