"""Very many messages, made with plain SQL: through the library five million would take most of an hour.

The rows of one message that the library itself has stored are copied under other identities, with some columns changed.
So this module depends on the tables and the names of identities, and on nothing else of the schema.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.engines import Engine

#: The tables in which a message that is alive, or has ended, has a row.
ALIVE = ("message", "delivery", "key")
ENDED = ("message", "outcome", "key")

#: By which column the rows of a message are found, the first of these that a table has.
_OWNERS = ("message_id", "seq", "id")
#: Columns with the id, or on SQLite the number, of the message itself.
_IDENTITIES = ("seq", "id", "message_id", "correlation_id", "causation_id")
#: A column with the id of those messages only that are dead letters.
_LETTER = "letter"
_KEYS = ("key", "idempotency_key")
#: Rows of one statement, so that the log stays small and is reused.
_PART = 250_000
#: Copies are older than every message that is sent, as in a deployment, and one is made each millisecond.
_AGE_MILLISECONDS = 30 * 86_400_000

_COLUMNS = {
    "sqlite": "SELECT name, lower(type) FROM pragma_table_info('onefold_{table}')",
    "postgres": "SELECT column_name, data_type FROM information_schema.columns "
    "WHERE table_schema = 'onefold' AND table_name = '{table}' ORDER BY ordinal_position",
}
_COPY = {
    "sqlite": """
        INSERT INTO onefold_{table} ({names})
        WITH RECURSIVE number (n) AS (SELECT {first} UNION ALL SELECT n + 1 FROM number WHERE n < {last})
        SELECT {values} FROM number, (SELECT * FROM onefold_{table} WHERE {owner} = '{example}' LIMIT 1) example""",
    "postgres": """
        INSERT INTO onefold.{table} ({names}) OVERRIDING SYSTEM VALUE
        SELECT {values} FROM generate_series({first}::bigint, {last}) n,
            (SELECT * FROM onefold.{table} WHERE {owner} = '{example}' LIMIT 1) example""",
}
#: The id of copy ``n``, a UUID of version 7 of its own millisecond.
_IDS = {
    "sqlite": "printf('%08x-%04x-7000-8000-%012x', ({begin} + n) >> 16, ({begin} + n) & 65535, n)",
    "postgres": "(lpad(to_hex({begin} + n), 12, '0') || '70008000' || lpad(to_hex(n), 12, '0'))::uuid",
}
#: The number that SQLite's tables make of that id; see ``onefold.store.sqlite.numbers``.
_NUMBER = "({begin} + n) << 20"


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies of one message; ``first`` tells them from other copies in the same store."""

    example: str
    messages: int
    tables: Sequence[str] = ALIVE
    first: int = 1
    #: SQL for other values, by column: ``n`` is the number of the copy, ``example`` the row that is copied.
    changed: Mapping[str, str] = field(default_factory=dict)


def name_of(engine: Engine, table: str) -> str:
    return f"onefold_{table}" if engine.name == "sqlite" else f"onefold.{table}"


def copy_messages(engine: Engine, url: str, copies: Copies) -> None:
    """Copy a message; raise if one of the tables has no row of it, or does not get as many rows as it should."""
    begin = time.time_ns() // 1_000_000 - _AGE_MILLISECONDS
    last = copies.first + copies.messages - 1
    seq = _number_of(engine, url, copies.example)
    for table in copies.tables:
        columns = _columns(engine, url, table)
        owner = next(name for name in _OWNERS if name in columns)
        values = {name: copies.changed.get(name) or _value(engine, name, kind, begin) for name, kind in columns.items()}
        example = seq if owner == "seq" else copies.example
        _copy(engine, url, table, values, (owner, example), (copies.first, last))


def copy_gates(engine: Engine, url: str, gate: str, *, gates: int, name: str) -> None:
    """Copy the saved state of a gate; ``name`` is SQL for the text of gate ``n``, from 1 on."""
    values = {column: f"example.{column}" for column in _columns(engine, url, "gate")}
    _copy(engine, url, "gate", {**values, "gate": name}, ("gate", gate), (1, gates))


def keep_done_messages(engine: Engine, url: str, messages: int) -> None:
    """Copy the one ended message in the store until there are that many more."""
    example = str(engine.execute(url, f"SELECT id FROM {name_of(engine, 'message')}")[0][0])
    copy_messages(engine, url, Copies(example, messages, ENDED))


def _number_of(engine: Engine, url: str, example: str) -> str:
    """Return the number under which SQLite's tables know a message; PostgreSQL's know it by its id."""
    if engine.name != "sqlite":
        return example
    rows = engine.execute(url, f"SELECT seq FROM onefold_message WHERE id = '{example}'")
    return str(rows[0][0])


def _columns(engine: Engine, url: str, table: str) -> dict[str, str]:
    return dict(engine.execute(url, _COLUMNS[engine.name].format(table=table)))


def _value(engine: Engine, name: str, kind: str, begin: int) -> str:
    """Return SQL for a column of a copy: the example's value, unless it is an identity."""
    id_ = _IDS[engine.name].format(begin=begin)
    if name in _KEYS:
        return "'copy-' || n"
    if name == _LETTER:
        return f"CASE WHEN example.{name} IS NOT NULL THEN {id_} END"
    if name not in _IDENTITIES:
        return f"example.{name}"
    if kind in ("integer", "bigint"):
        return _NUMBER.format(begin=begin)
    return f"({id_})::text" if engine.name == "postgres" and kind == "text" else id_


def _copy(
    engine: Engine, url: str, table: str, values: Mapping[str, str], where: tuple[str, str], span: tuple[int, int]
) -> None:
    owner, example = where
    count = f"SELECT count(*) FROM {name_of(engine, table)}"
    rows = int(engine.execute(url, count)[0][0])
    given = {"table": table, "names": ", ".join(values), "values": ", ".join(values.values())}
    copy = _COPY[engine.name]
    engine.load(url, (copy.format(**given, owner=owner, example=example, first=a, last=b) for a, b in _parts(*span)))
    made, wanted = int(engine.execute(url, count)[0][0]) - rows, span[1] - span[0] + 1
    if made != wanted:
        raise RuntimeError(f"{made} rows were copied in {table} instead of {wanted}")


def _parts(first: int, last: int) -> Iterator[tuple[int, int]]:
    for start in range(first, last + 1, _PART):
        yield start, min(start + _PART - 1, last)
