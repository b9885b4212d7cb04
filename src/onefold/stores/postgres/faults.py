"""What an error of the driver means: try again, connect again, or tell the caller in onefold's words."""

from __future__ import annotations

import psycopg
from psycopg import errors

from onefold.errors import OnefoldError, SchemaError, StoreError, StoreUnavailableError

#: The server ends sessions with these when it stops, fails over or loses patience.
_GONE_STATES = frozenset({"57P01", "57P02", "57P03", "57P05", "25P03"})
#: And answers with this when it is a former primary; a caller's own statement may deserve it.
_READ_ONLY_STATE = "25006"
#: A statement of this transaction has failed before.
_ABORTED_STATE = "25P02"
#: What the schema's own function raises.
_STALE_STATE = "OF001"


class BlockedError(StoreUnavailableError):
    """Another transaction held a key or a row for longer than this statement was allowed to wait."""


def is_gone(error: psycopg.Error, connection: psycopg.AsyncConnection[object]) -> bool:
    """Whether the session is over, so that nobody knows what became of its last statement."""
    if connection.closed:
        return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
    return error.sqlstate in _GONE_STATES or (error.sqlstate or "").startswith("08")


def is_lost(error: psycopg.Error, connection: psycopg.AsyncConnection[object]) -> bool:
    """Whether a statement of ours needs another session: this one is over, or its server no longer takes writes."""
    return is_gone(error, connection) or error.sqlstate == _READ_ONLY_STATE


def is_adrift(error: psycopg.Error) -> bool:
    """Whether somebody has left a failed transaction open on the session: nothing will ever be done on it again."""
    return error.sqlstate == _ABORTED_STATE


def is_stale(error: psycopg.Error) -> bool:
    """Whether a lease that had been taken over stopped the statements behind it; see ``refuse_stale`` in the schema."""
    return error.sqlstate == _STALE_STATE


def may_rerun(error: psycopg.Error) -> bool:
    """Whether the server rolled the transaction back only because of what others did at the same time."""
    return isinstance(error, errors.SerializationFailure | errors.DeadlockDetected)


def translated(error: psycopg.Error) -> OnefoldError:
    """Return the error of ours that says what a driver's error means for the caller."""
    said = str(error).strip() or type(error).__name__
    if isinstance(error, errors.LockNotAvailable):
        return BlockedError(f"PostgreSQL: {said}; nothing was written")
    if isinstance(error, errors.UndefinedTable | errors.InvalidSchemaName | errors.UndefinedFunction):
        return SchemaError(f"PostgreSQL: {said}; run `onefold migrate`")
    if isinstance(error, errors.SerializationFailure | errors.DeadlockDetected | errors.QueryCanceled):
        return StoreUnavailableError(f"PostgreSQL: {said}; nothing was written")
    # Class 53 is a full disk, memory or connections: it may work later.
    if isinstance(error, psycopg.OperationalError | psycopg.InterfaceError) or (error.sqlstate or "").startswith("53"):
        return StoreUnavailableError(f"PostgreSQL: {said}")
    return StoreError(f"PostgreSQL: {said}")
