"""SQLite through apsw, which brings a current one."""

from __future__ import annotations

from typing import Any

import apsw

from onefold.store.sqlite.drivers import Check, Row, Trace, Wait

_numbers = [int(number) for number in apsw.sqlite_lib_version().split(".")]
VERSION = (_numbers[0], _numbers[1], _numbers[2])


def connect(path: str, *, trace: Trace | None = None, wait_seconds: float = 0) -> Connection:
    """Open the file."""
    connection = Connection(path)
    connection.set_busy_timeout(round(wait_seconds * 1_000))
    if trace is not None:
        _install(connection, trace)
    return connection


class Connection(apsw.Connection):
    """A connection of apsw with the methods that the store needs of every library."""

    sees_dangling = True

    def __init__(self, path: str) -> None:
        super().__init__(path)
        # Otherwise every statement is planned anew whenever a parameter changes, which takes longer than to run it.
        self.config(apsw.SQLITE_DBCONFIG_ENABLE_QPSG, 1)

    def run_each(self, statements: str, parameters: Any, check: Check) -> list[Row]:
        def before(_cursor: apsw.Cursor, statement: str, _parameters: Any) -> bool:
            check(statement)
            return True

        cursor = self.cursor()
        cursor.exec_trace = before
        return cursor.execute(statements, parameters).fetchall()

    def begin(self) -> None:
        self.execute("BEGIN IMMEDIATE")

    def commit(self) -> None:
        self.execute("COMMIT")

    def wait_with(self, wait: Wait) -> None:
        self.set_busy_handler(wait)

    def has_dangling(self) -> bool:
        return bool(self.status(apsw.SQLITE_DBSTATUS_DEFERRED_FKS)[0])

    def become_writer(self) -> None:
        pass

    def empty_log(self) -> None:
        self.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)


def _install(connection: Connection, trace: Trace) -> None:
    def report(event: dict[str, Any]) -> None:
        trace("before" if event["code"] == apsw.SQLITE_TRACE_STMT else "after", event["sql"])

    connection.trace_v2(apsw.SQLITE_TRACE_STMT | apsw.SQLITE_TRACE_PROFILE, report)
