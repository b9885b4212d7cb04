"""The meaning of a driver's error: try again, connect again, or raise one of onefold's."""

from __future__ import annotations

import re

import psycopg
from psycopg import errors
from psycopg.errors import Diagnostic

from onefold.errors import OnefoldError, SchemaError, StoreConflictError, StoreError, StoreUnavailableError

#: The server ends sessions with these when it stops, fails over or loses patience.
_GONE_STATES = frozenset({"57P01", "57P02", "57P03", "57P05", "25P03"})
#: And answers with this when it is a former primary; a caller's own statement may deserve it.
_READ_ONLY_STATE = "25006"
#: A statement of this transaction has failed before.
_ABORTED_STATE = "25P02"
#: Data exceptions, violated constraints and internal errors such as a damaged page.
_ROW_CLASSES = frozenset({"22", "23", "XX"})
#: A savepoint that is not there, or no transaction for it to be in.
_ENDED_STATES = frozenset({"3B001", "25P01"})
#: Raised by the schema's function ``refuse_stale``.
_STALE_STATE = "OF001"


#: The server's function that waits for a standby: a name that, unlike its messages, is never translated.
_WAITING_FOR_STANDBY = "SyncRepWaitForLSN"


READ_ONLY = (
    "PostgreSQL takes no writes here: this server is a read replica, or a primary that was replaced; "
    "name the primary in the URL, or all servers with target_session_attrs=read-write"
)


class UnreplicatedError(psycopg.OperationalError):
    """A commit stands on the primary, and its wait for the synchronous standby was ended: it may be lost yet."""


#: A server's answers to a client that it will not let in; connecting again will not help.  libpq gives no state then.
_REFUSED = re.compile(
    r'FATAL:\s+(database "[^"]*" does not exist|role "[^"]*" does not exist|password authentication failed'
    r"|no pg_hba\.conf entry|permission denied for database|role \"[^\"]*\" is not permitted to log in)"
)


class RefusedError(StoreUnavailableError):
    """The server does not let this client in: there is no such database or role, or the password is wrong."""


class BlockedError(StoreUnavailableError):
    """Another transaction held a key or a row for longer than this statement was allowed to wait."""


def is_wait_ended(notice: Diagnostic) -> bool:
    """Whether a notice says that a commit was reported before its synchronous standby had it.

    PostgreSQL ends the wait with a warning when the session is cancelled or terminated, and calls it a success.
    """
    return notice.source_function == _WAITING_FOR_STANDBY


def refuse_refused(error: psycopg.OperationalError) -> None:
    """Raise ``RefusedError`` if a server has answered that it will not let this client in."""
    if found := _REFUSED.search(str(error)):
        raise RefusedError(f"PostgreSQL refuses the connection: {found[1]}") from error


def is_gone(error: psycopg.Error, connection: psycopg.AsyncConnection[object]) -> bool:
    """Whether the session is over or its commit in doubt, so that what became of its last statement is not known."""
    if isinstance(error, UnreplicatedError):
        return True
    if connection.closed:
        return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError | errors.InvalidSqlStatementName)
    return error.sqlstate in _GONE_STATES or (error.sqlstate or "").startswith("08")


def is_lost(error: psycopg.Error, connection: psycopg.AsyncConnection[object]) -> bool:
    """Whether a statement of ours needs another session: this one is over, or its server no longer takes writes."""
    return is_gone(error, connection) or error.sqlstate == _READ_ONLY_STATE


def is_adrift(error: psycopg.Error) -> bool:
    """Whether a failed transaction was left open on the session: no statement will ever be run on it again."""
    return error.sqlstate == _ABORTED_STATE


def has_ended(error: psycopg.Error) -> bool:
    """Whether the savepoint that marks a transaction is gone, which means that the transaction is."""
    return error.sqlstate in _ENDED_STATES


def is_stale_plan(error: psycopg.Error) -> bool:
    """Whether a prepared statement lost its plan because a table was changed; it was not begun.

    Known by the server's function, because the message is translated and the state is shared with other errors.
    """
    return isinstance(error, errors.FeatureNotSupported) and error.diag.source_function == "RevalidateCachedQuery"


def is_stale(error: psycopg.Error) -> bool:
    """Whether a lease that had been taken over stopped the statements behind it; see ``refuse_stale`` in the schema."""
    return error.sqlstate == _STALE_STATE


def may_rerun(error: psycopg.Error) -> bool:
    """Whether the server rolled the transaction back only because of concurrent transactions."""
    return isinstance(error, errors.SerializationFailure | errors.DeadlockDetected)


def is_about_rows(error: psycopg.Error) -> bool:
    """Whether a statement failed because of what is in some row: its data, a constraint, or damage to the table."""
    return (error.sqlstate or "")[:2] in _ROW_CLASSES


def translated(error: psycopg.Error) -> OnefoldError:
    """Return the error of ours that says what a driver's error means for the caller."""
    # Without what follows it, such as DETAIL, which quotes the values of rows.
    said = (error.diag.message_primary or str(error)).strip() or type(error).__name__
    if isinstance(error, errors.LockNotAvailable):
        return BlockedError(f"PostgreSQL: {said}; nothing was written")
    if isinstance(error, errors.UndefinedTable | errors.InvalidSchemaName | errors.UndefinedFunction):
        return SchemaError(f"PostgreSQL: {said}; run `onefold migrate`")
    if error.sqlstate == _READ_ONLY_STATE:
        return StoreUnavailableError(READ_ONLY)
    if may_rerun(error):
        return StoreConflictError(f"PostgreSQL: {said}; nothing was written")
    if isinstance(error, errors.QueryCanceled):
        return StoreUnavailableError(f"PostgreSQL: {said}; nothing was written")
    # Class 53 is a full disk, memory or connections: it may work later.
    if isinstance(error, psycopg.OperationalError | psycopg.InterfaceError) or (error.sqlstate or "").startswith("53"):
        return StoreUnavailableError(f"PostgreSQL: {said}")
    return StoreError(f"PostgreSQL: {said}")
