"""On PostgreSQL tables in use with a million messages every statement reads only the rows that it is about.

The server's own counters of a transaction are read before and after each statement, on the connection and with the
parameters, the settings and the kept plan that it has in a worker.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from benchmarks.engines import Postgres
from tests.unit.store.size_scene import LARGE, SLOW, Scene, fill_with_all_noise

from onefold.store import Query, State
from onefold.store.postgres.wire import connect
from onefold.store.postgres.wire.pipeline import Answer, Pipeline
from onefold.store.postgres.wire.statements import OURS, WireQuery
from onefold.testing.servers import PostgresServer

pytestmark = [pytest.mark.deep, pytest.mark.timeout(1_800)]

#: Rows and index entries that a statement may read for each row that it returns or writes, and besides: entries of rows
#: that the scene has changed and the server has not cleaned up yet, and as many of the oldest acts as a purge looks at.
ROWS_EACH, ROWS_MORE = 10, 250
#: Pages likewise: an index is three or four pages deep, and a row has up to twelve indexes.  Entries of an index that a
#: scan only compares are in no counter of rows, but their pages are.
PAGES_EACH, PAGES_MORE = 60, 500
#: Rows that are there, with those that the server has not cleaned up, and pages for each of them.
WHOLE_PART, PAGES_WHOLE = 1.1, 3
#: From the sixth time on the server may keep a plan for all parameters.
ROUNDS = 7
#: The settings by which our own connections steer the planner.
STEERING = ("enable_seqscan", "plan_cache_mode")

_NAMES = {statement.text: name for name, statement in OURS.items()}
_COUNTERS = WireQuery(
    b"""
    SELECT pg_catalog.sum(pg_catalog.pg_stat_get_xact_tuples_returned(oid))::bigint,
        pg_catalog.sum(pg_catalog.pg_stat_get_xact_tuples_inserted(oid)
            + pg_catalog.pg_stat_get_xact_tuples_updated(oid)
            + pg_catalog.pg_stat_get_xact_tuples_deleted(oid))::bigint,
        pg_catalog.sum(pg_catalog.pg_stat_get_xact_blocks_fetched(oid))::bigint
    FROM pg_catalog.pg_class WHERE relnamespace = 'onefold'::pg_catalog.regnamespace""",
    result_format=0,
)

#: Statements that read all messages of a kind, for their answer or because those are few, and SQL that counts them.
WHOLE = {
    "count_alive": "SELECT count(*) FROM onefold.delivery",
    "count_dead": f"SELECT count(*) FROM onefold.outcome WHERE state = {State.DEAD:d}",
    # Those that run, which are no more than workers have room for, and the message of each.
    "find_leased": f"SELECT 2 * count(*) FROM onefold.delivery WHERE state = {State.LEASED:d}",
}
#: Statements that the scene does not run.
LEFT_OUT = {
    **dict.fromkeys(
        ("put_probe", "replicated", "settle_lock", "settle_found", "claim_again", "record_lock"),
        "named messages, after a lost answer",
    ),
    **dict.fromkeys(("drop_key", "settle_locked", "record_known", "record_stands"), "named rows, after a conflict"),
    **dict.fromkeys(("claim_candidates", "claim_set_aside"), "when the row of a message is damaged"),
    **dict.fromkeys(("restored_lock", "restored"), "once after a restore, page by page"),
    **dict.fromkeys(("schema_lock", "schema_create", "schema_table", "schema_record"), "when the schema is made"),
    "listen": "goes through psycopg, and reads nothing",
}


class Cost(NamedTuple):
    """What one run of a statement returned, wrote and read."""

    returned: int
    read: int
    written: int
    pages: int

    def is_over(self, whole: int = 0) -> bool:
        """Whether it read more than it should; ``whole`` is how many rows it reads by its nature."""
        about = self.returned + self.written
        rows = ROWS_EACH * about + ROWS_MORE + round(WHOLE_PART * whole)
        return self.read > rows or self.pages > PAGES_EACH * about + PAGES_MORE + PAGES_WHOLE * whole


class Costs:
    """What our statements cost, on every connection of this process."""

    def __init__(self) -> None:
        self.of: dict[str, list[Cost]] = defaultdict(list)
        self._send = Pipeline.send

    @contextmanager
    def counted(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Inside the block, read the counters around every statement of ours, in the same round trip."""

        def send(
            pipeline: Pipeline, queries: Sequence[WireQuery], after: Sequence[WireQuery] = ()
        ) -> asyncio.Future[Answer]:
            return self._count(pipeline, queries, after)

        with monkeypatch.context() as patch:
            patch.setattr(Pipeline, "send", send)
            yield

    def _count(
        self, pipeline: Pipeline, queries: Sequence[WireQuery], after: Sequence[WireQuery]
    ) -> asyncio.Future[Answer]:
        names = [_NAMES.get(query.text) for query in queries]
        asked = [
            one
            for name, query in zip(names, queries, strict=True)
            for one in ([query] if name is None else [_COUNTERS, query, _COUNTERS])
        ]
        given: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

        def pass_on(answer: asyncio.Future[Answer]) -> None:
            error = answer.exception()
            if given.done():
                return
            if error is not None:
                given.set_exception(error)
                return
            results = iter(answer.result())
            given.set_result([*(self._note(name, results) for name in names), *results])

        self._send(pipeline, asked, after).add_done_callback(pass_on)
        return given

    def _note(self, name: str | None, results: Iterator[Any]) -> Any:
        if name is None:
            return next(results)
        before, result, behind = next(results), next(results), next(results)
        counts = [int(behind.get_value(0, n) or 0) - int(before.get_value(0, n) or 0) for n in range(3)]
        self.of[name].append(Cost(result.ntuples, *counts))
        return result


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A database with a million messages, cleaned and analyzed."""
    with PostgresServer() as server:
        database = server.create_database("size")
        asyncio.run(fill_with_all_noise(Postgres(tmp_path_factory.mktemp("size")), database, LARGE))
        yield database


def unsteered() -> Mapping[str, Mapping[str, str]]:
    """Return the settings of our connections without those for the planner."""
    return {
        role: {name: value for name, value in settings.items() if name not in STEERING}
        for role, settings in connect.SETTINGS.items()
    }


@pytest.mark.parametrize("steered", [True, False], ids=["our settings", "the server's settings"])
def test_no_statement_reads_rows_that_it_is_not_about(
    url: str, steered: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if not steered:
        monkeypatch.setattr(connect, "SETTINGS", unsteered())
    engine, costs = Postgres(tmp_path), Costs()
    whole = {name: engine.execute(url, sql)[0][0] for name, sql in WHOLE.items()}
    with costs.counted(monkeypatch):
        asyncio.run(Scene(url).play(ROUNDS))
    assert set(OURS) - set(costs.of) == set(LEFT_OUT)
    over = {
        name: [cost for cost in those if cost.is_over(whole.get(name, 0))][:3]
        for name, those in costs.of.items()
        if any(cost.is_over(whole.get(name, 0)) for cost in those)
    }
    assert over == {}


@pytest.mark.parametrize(
    "query",
    [pytest.param(query, id=name, marks=pytest.mark.xfail(reason=reason)) for name, (query, reason) in SLOW.items()],
)
def test_a_page_reads_no_more_than_it_returns(url: str, query: Query, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = Costs()
    with costs.counted(monkeypatch):
        asyncio.run(Scene(url).ask(query))
    assert not [cost for name, those in costs.of.items() if name.startswith("find") for cost in those if cost.is_over()]
