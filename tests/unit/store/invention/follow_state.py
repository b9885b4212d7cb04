"""Bring a message into every state that there is, and name each place that does not know one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import fields
from itertools import product
from typing import Any

import apsw
import psycopg

from onefold import App
from onefold.store import MOVES, Counts, Done, Query, State

Execute = Callable[[str], list[tuple[Any, ...]]]

#: What a row of each table says beside its state; of these, a constraint allows one combination for each state.
ALIVE = {"lease_until": ("NULL", "1"), "worker": ("NULL", "'w'"), "wake_target": ("NULL", "1")}
ENDED = {"result": ("NULL", "{bytes}"), "failure": ("NULL", "{bytes}")}


@contextmanager
def connection(url: str) -> Iterator[tuple[Execute, str, str]]:
    """Yield how to run SQL on the store's tables, what their names begin with, and how bytes are written."""
    if url.startswith("sqlite"):
        with closing(apsw.Connection(url.removeprefix("sqlite:///").partition("?")[0])) as file:
            yield lambda sql: file.execute(sql).fetchall(), "onefold_", "CAST('{}' AS BLOB)"
        return
    with psycopg.connect(url, autocommit=True) as server:

        def run(sql: str) -> list[tuple[Any, ...]]:
            cursor = server.execute(sql.encode())
            return cursor.fetchall() if cursor.description else []

        yield run, "onefold.", "'{}'::bytea"


def bring_to(execute: Execute, table: str, state: State, columns: dict[str, tuple[str, ...]]) -> bool:
    """Write the state into the only row of a table, with whatever else its constraint asks for."""
    for values in product(*columns.values()):
        given = ", ".join(f"{column} = {value}" for column, value in zip(columns, values, strict=True))
        with suppress(apsw.ConstraintError, psycopg.errors.CheckViolation):
            execute(f"UPDATE {table} SET state = {int(state)}, {given}")
            return True
    return False


async def follow(url: str) -> list[str]:
    """Return a line for each place that does not know a state."""
    unknown: list[str] = []
    app = App(url)

    @app.task(queue="states")
    async def work() -> None: ...

    await app.migrate()
    async with app:
        for state in State:
            name = state.name.lower()
            if not any(to is state for _, to in MOVES):
                unknown.append(f"{name}: no move in MOVES leads to it")
            receipt = await work.send()
            if state.ended:
                leases = await app.store.claim(["states"], types=["work"], limit=1, lease=30.0, worker="w")
                await app.store.settle([(lease, Done(b"null")) for lease in leases])
            with connection(url) as (execute, prefix, some_bytes):
                if state.ended:
                    columns = {name: (null, some_bytes) for name, (null, _) in ENDED.items()}
                    if prefix == "onefold_":
                        columns["letter"] = ("NULL", "'letter'")
                    taken = bring_to(execute, f"{prefix}outcome", state, columns)
                else:
                    taken = bring_to(execute, f"{prefix}delivery", state, ALIVE)
                if not taken:
                    unknown.append(f"{name}: no table takes it")
                elif execute(f"SELECT state FROM {prefix}inbox") != [(name,)]:
                    unknown.append(f"{name}: the view inbox has no name for it")
                elif not [one for one in await app.find(Query(states=(state,))) if one.envelope.id == receipt.id]:
                    unknown.append(f"{name}: find does not find it")
                for table in ("delivery", "outcome", "key", "message"):
                    execute(f"DELETE FROM {prefix}{table}")
            if not state.ended and name not in {field.name for field in fields(Counts)}:
                unknown.append(f"{name}: count does not count it")
    return unknown
