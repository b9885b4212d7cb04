"""On a SQLite file in use with a million messages no statement takes more steps than beside a tenth of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import apsw
import pytest
from benchmarks.engines import SQLite
from tests.unit.store.size_scene import LARGE, SLOW, SMALL, Scene, fill_with_all_noise

from onefold.store import Query
from onefold.store.sqlite.session import SQL

pytestmark = [pytest.mark.deep, pytest.mark.timeout(1_800)]

#: How many steps a statement may take beside ten times as many messages: b-trees are a level deeper, and claims that
#: take turns leave a few more messages of the scene behind.
RATIO_MAX, STEPS_MORE = 1.5, 1_000
ROUNDS = 2
_STEPS = "SQLITE_STMTSTATUS_VM_STEP"
_NAMES = {statement: name for name, statement in SQL.items()}
#: Statements that read all messages of a kind, for their answer or because those are few.
WHOLE = {
    "count_alive": "counts all of them",
    "count_dead": "counts all of them",
    "find_leased": "reads all messages that run, which are no more than workers have room for",
}
#: Statements that the scene does not run.
LEFT_OUT = {
    "claim_grace": "extends leases that have run out, by their index; only on the machine's own clock",
    "claim_set_aside": "one message, by its number, when its row is damaged",
    "expire_all": "once after a restart of the machine",
    "record_stands": "one line, by its key, after a conflict",
    "restored_leases": "once after a restore",
    "restored_deliveries": "once after a restore",
    "restored_outcomes": "once after a restore",
}


class Steps:
    """The steps of SQLite's virtual machine that each statement took at most."""

    def __init__(self) -> None:
        self.most: Counter[str] = Counter()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Inside the block, count on every connection that is opened."""
        apsw.connection_hooks.append(self._hook)
        try:
            yield
        finally:
            apsw.connection_hooks.remove(self._hook)

    def _hook(self, connection: apsw.Connection) -> None:
        connection.trace_v2(apsw.SQLITE_TRACE_PROFILE, self._note)

    def _note(self, event: dict[str, Any]) -> None:
        if (name := _NAMES.get(event["sql"])) is not None:
            self.most[name] = max(self.most[name], event["stmt_status"][_STEPS])


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The smaller file and the larger one."""
    engine = SQLite(tmp_path_factory.mktemp("size"))
    files = [engine.create(), engine.create()]
    for url, share in zip(files, (SMALL, LARGE), strict=True):
        asyncio.run(fill_with_all_noise(engine, url, share))
    assert engine.execute(files[1], "SELECT count(*) FROM onefold_message")[0][0] > 1_000_000
    return files


@pytest.mark.parametrize("analyzed", [False, True])
def test_no_statement_takes_more_steps_beside_a_million_messages(
    urls: list[str], analyzed: bool, tmp_path: Path
) -> None:
    taken = []
    for url in urls:
        if analyzed:
            SQLite(tmp_path).execute(url, "ANALYZE")
        steps = Steps()
        with steps.counted():
            asyncio.run(Scene(url).play(ROUNDS))
        taken.append(steps.most)
    few, many = taken
    assert set(SQL) - set(many) == set(LEFT_OUT)
    more = {name: (few[name], many[name]) for name in many if many[name] > few[name] * RATIO_MAX + STEPS_MORE}
    assert set(more) <= set(WHOLE), more


@pytest.mark.parametrize(
    "query",
    [pytest.param(query, id=name, marks=pytest.mark.xfail(reason=reason)) for name, (query, reason) in SLOW.items()],
)
def test_a_page_takes_no_more_steps_beside_a_million_messages(urls: list[str], query: Query) -> None:
    taken = []
    for url in urls:
        steps = Steps()
        with steps.counted():
            asyncio.run(Scene(url).ask(query))
        taken.append(max(steps.most.values()))
    assert taken[1] <= taken[0] * RATIO_MAX + STEPS_MORE
