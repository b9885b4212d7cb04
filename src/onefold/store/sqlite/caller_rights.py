"""The caller's own SQL on a connection that many share: what it may do there.

Statements that would change the connection for all that come after, or end the transaction, are refused, and so are
those that change the store's own schema.  What a statement does is known when SQLite compiles it; only the words that
begin and end transactions are looked for in the text, because the store's own statements with the same text are already
compiled.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from onefold.errors import StoreError, TransactionOpenError
from onefold.store.sqlite.drivers import ERRORS, Connection, Row

#: White space and comments before a statement, then its first word if that would end the transaction or nest one.
_CONTROL = re.compile(
    r"(?>[\s;\ufeff]|--[^\n]*+|/\*.*?(?:\*/|\Z))*+(BEGIN|COMMIT|END|ROLLBACK|SAVEPOINT|RELEASE)\b",
    re.IGNORECASE | re.DOTALL,
)

_OK, _DENY = 0, 1
#: SQLite's codes for what a statement does; in the last line the name of the table comes second, elsewhere first.
_PRAGMA, _ATTACH, _DETACH = 19, 24, 25
_INSERT = 18
_CHANGES = {11: "DROP TABLE", 10: "DROP INDEX", 16: "DROP TRIGGER", 17: "DROP VIEW"}
_CHANGES_OF = {7: "CREATE TRIGGER ON", 26: "ALTER TABLE"}
_OURS = "onefold_"
#: These only tell about tables.
_PRAGMAS = frozenset(
    {"table_info", "table_xinfo", "table_list", "index_list", "index_info", "index_xinfo", "foreign_key_list"}
)


class Rights:
    """Asked by SQLite about every part of a statement that it compiles; answers for the caller's statements only."""

    __slots__ = ("_refused", "_strict")

    def __init__(self) -> None:
        self._strict = False
        self._refused = ""

    def __call__(self, action: int, first: str | None, second: str | None, schema: str | None, *_: str | None) -> int:
        if not self._strict or not (refused := _refusal(action, first or "", second or "", schema)):
            return _OK
        self._refused = self._refused or refused
        return _DENY

    def run(self, connection: Connection, statements: str, parameters: Sequence[Any] | Mapping[str, Any]) -> list[Row]:
        """Run the caller's SQL, which may be several statements."""
        self._strict, self._refused = True, ""
        try:
            return connection.run_each(statements, parameters, refuse_control)
        except ERRORS as error:
            if self._refused:
                raise StoreError(self._refused) from error
            raise
        finally:
            self._strict = False


def _refusal(action: int, first: str, second: str, schema: str | None) -> str:
    """Return why a caller's statement may not do this, or nothing."""
    if action == _PRAGMA and first.lower() not in _PRAGMAS:
        return (
            f"PRAGMA {first} would change the connection through which every message of this process is written; "
            "use a connection of your own to another file, or a setting of the store"
        )
    if action in (_ATTACH, _DETACH):
        word = "ATTACH, VACUUM" if action == _ATTACH else "DETACH"
        return (
            f"{word} would change the connection through which every message of this process is written; "
            "open the other file with a connection of your own"
        )
    if action == _INSERT and schema == "temp":
        # Whatever is created there is first of all a row of the schema's own table.
        return (
            "a temporary table, view or trigger would stay on the connection that all handlers share; "
            "use a table of the database, or WITH … AS (…) inside the statement"
        )
    for change, name in ((_CHANGES.get(action), first), (_CHANGES_OF.get(action), second)):
        if change is not None and name.lower().startswith(_OURS):
            return f"{change} {name} would change the store's own schema, which belongs to its migrations"
    return ""


def refuse_control(statement: str) -> None:
    """Refuse a statement that begins or ends a transaction."""
    if found := _CONTROL.match(statement):
        raise TransactionOpenError(
            f"{found[1].upper()} is not yours to say here: the transaction ends with the handler or the block"
        )
