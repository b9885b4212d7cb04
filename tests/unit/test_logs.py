"""The lines of the log, their levels, and their values as data for formatters that write JSON."""

from __future__ import annotations

import ast
import asyncio
import json
import linecache
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import onefold
from onefold import Context, LeaseLostError, RetryPolicy, Run, TransportError, limits, never
from onefold.clock import MICROSECONDS, SystemClock

if TYPE_CHECKING:
    from tests.unit.conftest import Bench

HOSTILE = 'a b=c "d"\n\x1b[2J'


class Json(logging.Formatter):
    """Formats a record as a log collector reads it."""

    def format(self, record: logging.LogRecord) -> str:
        found = vars(record)
        return json.dumps({"level": record.levelname, "event": found["event"], **found["fields"]})


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Iterator[list[dict[str, object]]]:
    """The lines that were logged, read back from JSON."""
    read: list[dict[str, object]] = []

    class Reader(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            read.append(json.loads(self.format(record)))

    caplog.set_level(logging.DEBUG, logger="onefold")
    logger, handler = logging.getLogger("onefold"), Reader()
    handler.setFormatter(Json())
    logger.addHandler(handler)
    yield read
    logger.removeHandler(handler)


def of(told: list[dict[str, object]], *events: str) -> list[tuple[object, object]]:
    return [(one["level"], one["event"]) for one in told if one["event"] in events]


def test_a_record_has_its_event_and_its_fields_as_data(told: list[dict[str, object]]) -> None:
    """Values are as they were, without the quotes of the line; of an error only the type is logged."""
    logger = logging.getLogger("onefold")
    logger.warning("retry key=%s attempt=%d error=%s and more", HOSTILE, 7, ValueError("secret"))
    logger.warning("%s doing=%s error=%s", "store_failed", "claim", TransportError("the broker is away"))
    logger.info("plain")
    assert told == [
        {"level": "WARNING", "event": "retry", "key": HOSTILE, "attempt": 7, "error": "ValueError"},
        {"level": "WARNING", "event": "store_failed", "doing": "claim", "error": "TransportError: the broker is away"},
        {"level": "INFO", "event": "plain"},
    ]


def test_a_record_has_the_time_and_the_place_where_it_was_logged(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a retry, a dead letter, a handler past its timeout and a lost lease; the next message runs after it."""
    moments: list[tuple[str, float]] = []

    def note(what: str) -> None:
        moments.append((what, SystemClock().now() / MICROSECONDS))

    @bench.app.task(retry=RetryPolicy(max_attempts=2, jitter=False))
    async def fails(number: int) -> None:
        note("fails")
        raise ValueError("no")

    @bench.app.task(timeout=0.05, retry=RetryPolicy(max_attempts=1))
    async def late() -> None:
        note("late")
        await asyncio.Event().wait()

    @bench.app.task
    async def stolen() -> None:
        note("stolen")
        raise LeaseLostError("taken over")

    async def scenario() -> None:
        await bench.app.send_many([fails.call(1), fails.call(2), late.call(), stolen.call()])
        await bench.app.work(until_idle=True, concurrency=1)
        bench.clock.advance(5)
        await bench.app.work(until_idle=True, concurrency=1)
        note("over")

    bench.run(scenario)
    records = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [
        (vars(record)["event"], vars(record)["fields"].get("error"), record.module, record.funcName)
        for record in records
    ] == [
        ("retry", "ValueError", "execution", "decide_failure"),
        ("retry", "ValueError", "execution", "decide_failure"),
        ("dead", "HandlerTimeoutError", "execution", "decide_failure"),
        ("lease_lost", None, "settler", "log_lost"),
        ("dead", "ValueError", "execution", "decide_failure"),
        ("dead", "ValueError", "execution", "decide_failure"),
    ]
    for record in records:
        assert "logger." in linecache.getline(record.pathname, record.lineno)
    assert [what for what, _ in moments] == ["fails", "fails", "late", "stolen", "fails", "fails", "over"]
    for (_, began), record, (_, next_began) in zip(moments, records, moments[1:], strict=False):
        assert began <= record.created <= next_began


def formats() -> Iterator[tuple[str, str]]:
    """Yield every format of a log line in the package."""
    for file in sorted(Path(onefold.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            called = node.func if isinstance(node, ast.Call) else None
            if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.value.id == "logger":
                texts = [one.value for one in node.args if isinstance(one, ast.Constant)]  # type: ignore[attr-defined]
                yield from ((f"{file.name}:{node.lineno}", one) for one in texts[:1] if isinstance(one, str))  # type: ignore[attr-defined]


def test_every_line_is_an_event_and_named_values() -> None:
    """So that a record has as data everything that its line has."""
    found = list(formats())
    assert len(found) > 40
    form = re.compile(r"(\w+|%s)( \w+=(%[.\d]*[sdf]|\w+))*[:;]?( [^%]*)?")
    assert not [(place, text) for place, text in found if not form.fullmatch(text)]


def test_a_message_that_a_person_cancels_is_not_a_lost_lease(
    bench: Bench, told: list[dict[str, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is ``cancelled`` at INFO, for a task and for a saga."""
    monkeypatch.setattr(limits, "REPORT_SECONDS", 0.01)
    started = asyncio.Event()

    @bench.app.task
    async def endless() -> None:
        started.set()
        await asyncio.Event().wait()

    @bench.app.step(undo=never("nothing to do"))
    async def wait(ctx: Context) -> None:
        started.set()
        await asyncio.Event().wait()

    @bench.app.saga
    async def travel(run: Run) -> None:
        await run.step(wait)

    async def scenario() -> None:
        for one in (endless, travel):
            started.clear()
            sent = await one.send()
            working = asyncio.create_task(bench.work())
            await started.wait()
            assert await bench.app.cancel(sent.id, actor="ada", reason="no longer wanted")
            await working

    bench.run(scenario)
    assert of(told, "lease_lost", "cancelled") == [("INFO", "cancelled")] * 2


def test_a_message_that_is_cancelled_before_it_is_settled_is_not_a_lost_lease(
    bench: Bench, told: list[dict[str, object]]
) -> None:
    @bench.app.task
    async def late(ctx: Context) -> None:
        await bench.app.store.now()
        assert await take_back(ctx.message.id)

    async def take_back(id_: str) -> bool:
        # Outside of the handler's own commit, as another process does it.
        return await asyncio.to_thread(lambda: asyncio.run(cancel_elsewhere(bench.url, id_)))

    async def scenario() -> None:
        await late.send()
        await bench.work()

    bench.run(scenario)
    assert of(told, "lease_lost", "cancelled") == [("INFO", "cancelled")]


async def cancel_elsewhere(url: str, id_: str) -> bool:
    async with onefold.App(url) as app:
        return await app.cancel(id_, actor="ada", reason="no longer wanted")


@pytest.mark.parametrize("graceful", [True, False])
def test_a_handler_that_a_stop_ends_is_not_a_lost_lease(
    bench: Bench, told: list[dict[str, object]], graceful: bool
) -> None:
    """Neither when the time of a graceful stop is over, nor when the worker itself is cancelled."""
    started = asyncio.Event()

    @bench.app.task
    async def endless() -> None:
        started.set()
        await asyncio.Event().wait()

    async def scenario() -> None:
        sent = await endless.send()
        working = asyncio.create_task(bench.app.work(stop_after=0))
        await started.wait()
        if graceful:
            bench.app.stop_working()
        else:
            working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        assert not graceful or (await bench.record(sent)).state.name == "SCHEDULED"

    bench.run(scenario)
    assert of(told, "lease_lost", "stopped") == [("INFO", "stopped")]


def test_duplicates_are_logged_however_they_are_sent(bench: Bench, told: list[dict[str, object]]) -> None:
    """Alone, in a batch and in a transaction; of very many only the first are logged one by one."""

    @bench.app.task(key="{number}", retry=RetryPolicy(max_attempts=1))
    async def note(number: int) -> None: ...

    async def scenario() -> None:
        for _ in range(2):
            await note.send(0)
            await bench.app.send_many([note.call(number) for number in range(1, 26)])
            async with bench.app.transaction() as tx:
                tx.send(note, 100)

    bench.run(scenario)
    logged = [one for one in told if str(one["event"]).startswith("duplicate")]
    assert {one["level"] for one in logged} == {"INFO"}
    assert [one.get("idempotency_key", one.get("messages")) for one in logged] == [
        "0",
        *map(str, range(1, 11)),
        15,
        "100",
    ]
