"""Very many ended messages, made with plain SQL: through the library five million would take most of an hour.

The rows of one message that the library itself sent and settled are copied under other identities.
So this module depends on the tables and the names of identities, and on nothing else of the schema.
"""

from __future__ import annotations

from benchmarks.engines import Engine

#: The tables in which an ended message has a row.
_TABLES = ("message", "outcome", "key")
_IDENTITIES = ("seq", "id", "message_id", "message_seq")
_KEYS = ("key", "idempotency_key")
_PART = 250_000

_COLUMNS = {
    "sqlite": "SELECT name, lower(type) FROM pragma_table_info('onefold_{table}')",
    "postgres": "SELECT column_name, data_type FROM information_schema.columns "
    "WHERE table_schema = 'onefold' AND table_name = '{table}' ORDER BY ordinal_position",
}
_COPY = {
    "sqlite": """
        INSERT INTO onefold_{table} ({names})
        WITH RECURSIVE number (n) AS (SELECT {first} UNION ALL SELECT n + 1 FROM number WHERE n < {last})
        SELECT {values} FROM number, (SELECT * FROM onefold_{table} LIMIT 1) example""",
    "postgres": """
        INSERT INTO onefold.{table} ({names}) OVERRIDING SYSTEM VALUE
        SELECT {values} FROM generate_series({first}, {last}) n, (SELECT * FROM onefold.{table} LIMIT 1) example""",
}
#: Numbers below zero are never used by the store; texts and the like sort before any that are.
_VALUES = {
    "integer": "n - 1000000000",
    "bigint": "n - 1000000000",
    "text": "printf('%032x', n)",
    "blob": "unhex(printf('%032x', n))",
    "uuid": "lpad(to_hex(n), 32, '0')::uuid",
}


def keep_done_messages(engine: Engine, url: str, messages: int) -> None:
    """Copy the one ended message in the store until there are that many more."""
    parts = [(first, min(first + _PART, messages + 1) - 1) for first in range(1, messages + 1, _PART)]
    for table in _TABLES:
        columns = engine.execute(url, _COLUMNS[engine.name].format(table=table))
        names = ", ".join(name for name, _ in columns)
        values = ", ".join(_value(name, kind) for name, kind in columns)
        copy = _COPY[engine.name]
        engine.load(url, [copy.format(table=table, names=names, values=values, first=a, last=b) for a, b in parts])
    _check(engine, url, messages)


def _value(name: str, kind: str) -> str:
    if name in _KEYS:
        return "'kept-' || n"
    if name not in _IDENTITIES:
        return f"example.{name}"
    return _VALUES[kind]


def _check(engine: Engine, url: str, messages: int) -> None:
    prefix = "onefold_" if engine.name == "sqlite" else "onefold."
    for table in _TABLES:
        rows = engine.execute(url, f"SELECT count(*) FROM {prefix}{table}")[0][0]
        if rows != messages + 1:
            raise RuntimeError(f"{rows} rows in {table} instead of {messages + 1}")
