"""Migrations of a PostgreSQL database: applied under a lock, refused when the schema is not ours to change."""

from __future__ import annotations

from psycopg import errors

from onefold.errors import SchemaError
from onefold.store.postgres.wire.wire import Wire
from onefold.store.shared.sql import Migration, load_migrations, split_script

MIGRATIONS = load_migrations("onefold.store.postgres")

#: The table of migrations is made once; losing that race again and again is something else.
_RACES_MAX = 10


async def missing_migrations(wire: Wire) -> list[Migration]:
    """Return what is still to be applied; raises ``SchemaError`` for a schema from the future or not ours."""
    if (await wire.rows("server_encoding"))[0][0] == "SQL_ASCII":
        raise SchemaError(
            "the database has the encoding SQL_ASCII, which keeps bytes without knowing what they mean; "
            "use a database made with CREATE DATABASE … ENCODING 'UTF8' TEMPLATE template0"
        )
    ours, occupied = (await wire.rows("schema_state"))[0]
    if not ours:
        if occupied:
            raise SchemaError(
                "the database has a schema named 'onefold' that onefold did not make; "
                "use another database, or rename that schema"
            )
        return MIGRATIONS
    try:
        applied: dict[int, str] = dict(await wire.rows("schema_applied"))
    except errors.UndefinedColumn as error:
        raise SchemaError("the table onefold.migration was not made by onefold; use another database") from error
    for number in applied.keys() - {migration.number for migration in MIGRATIONS}:
        raise SchemaError(
            f"the database has migration {number}, which this version of onefold does not know: "
            "it was made by a newer one; upgrade onefold"
        )
    for migration in MIGRATIONS:
        if applied.get(migration.number, migration.checksum) != migration.checksum:
            raise SchemaError(f"migration {migration.name} was applied with another content; the schema is not ours")
    return [migration for migration in MIGRATIONS if migration.number not in applied]


async def refuse_unfinished(wire: Wire) -> None:
    """Refuse to run on anything but the schema this version was written for."""
    missing = await missing_migrations(wire)
    if missing:
        raise SchemaError(f"the database lacks migration {missing[0].name}; run `onefold migrate`")


async def migrate(wire: Wire, now: int | None, done: list[str]) -> None:
    """Apply what is missing, each file in a transaction of its own together with its record; add the names."""
    races = 0
    while True:
        try:
            async with wire.transaction():
                # The table is made first, because it is the lock: none but its owner's roles can hold that.
                if await missing_migrations(wire) == MIGRATIONS:
                    await wire.rows("schema_create")
                    await wire.rows("schema_table")
                await wire.rows("schema_lock")
                missing = await missing_migrations(wire)
                if not missing:
                    return
                await _apply(wire, missing[0], now)
        except (errors.UniqueViolation, errors.DuplicateSchema, errors.DuplicateTable):
            # Another machine has made the table at the same moment, and its migration is committed by now.
            races += 1
            if races > _RACES_MAX:
                raise
            continue
        done.append(missing[0].name)


async def _apply(wire: Wire, migration: Migration, now: int | None) -> None:
    for statement in split_script(migration.text):
        await wire.script(statement)
    record = {"number": migration.number, "name": migration.name, "checksum": migration.checksum, "now": now}
    await wire.rows("schema_record", record)
