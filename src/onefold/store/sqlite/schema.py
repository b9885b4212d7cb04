"""Migrations of a SQLite file: applied under the write lock, refused when the file is not ours to change."""

from __future__ import annotations

from onefold.errors import SchemaError
from onefold.store.shared.sql import Migration, load_migrations
from onefold.store.sqlite.drivers import Connection

MIGRATIONS = load_migrations("onefold.store.sqlite")

_TABLE = """
CREATE TABLE IF NOT EXISTS onefold_migration (
    number INTEGER PRIMARY KEY, name TEXT NOT NULL, checksum TEXT NOT NULL, applied_at INTEGER NOT NULL
)"""


def missing_migrations(connection: Connection) -> list[Migration]:
    """Return what is still to be applied; raises ``SchemaError`` for a schema from the future or not ours."""
    tables = {
        row[0] for row in connection.execute("SELECT name FROM sqlite_schema WHERE name LIKE 'onefold\\_%' ESCAPE '\\'")
    }
    if "onefold_migration" not in tables:
        if tables:
            raise SchemaError(
                f"the database has tables named {min(tables)!r} and so on that onefold did not make; "
                "use another file, or rename them"
            )
        return MIGRATIONS
    applied = {row[0]: row[1] for row in connection.execute("SELECT number, checksum FROM onefold_migration")}
    for number in applied.keys() - {migration.number for migration in MIGRATIONS}:
        raise SchemaError(
            f"the database has migration {number}, which this version of onefold does not know: "
            "it was made by a newer one; upgrade onefold"
        )
    for migration in MIGRATIONS:
        if applied.get(migration.number, migration.checksum) != migration.checksum:
            raise SchemaError(f"migration {migration.name} was applied with another content; the database is not ours")
    return [migration for migration in MIGRATIONS if migration.number not in applied]


def migrate(connection: Connection, now: int) -> list[str]:
    """Apply what is missing, all in the transaction that the caller holds; return the names."""
    todo = missing_migrations(connection)
    connection.execute(_TABLE)
    for migration in todo:
        connection.execute(
            "INSERT INTO onefold_migration VALUES (?, ?, ?, ?)",
            (migration.number, migration.name, migration.checksum, now),
        )
        connection.run_each(migration.text, (), lambda _: None)
    return [migration.name for migration in todo]
