"""G4: a message that is cancelled while it runs ends within about a second, wherever it runs."""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from onefold import Context, HandlerTimeoutError, Query, State, SyncContext, limits

if TYPE_CHECKING:
    from tests.unit.conftest import Bench


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report a hundred times as often, so that no test waits for a second."""
    monkeypatch.setattr(limits, "REPORT_SECONDS", 0.01)


async def cancel(bench: Bench, id_: str) -> None:
    assert await bench.app.cancel(id_, actor="ada", reason="no longer wanted")


async def assert_cancelled(bench: Bench, id_: str) -> None:
    (record,) = await bench.app.find(Query(ids=(id_,)))
    assert (record.state, record.attempt) == (State.CANCELLED, 0)


def test_a_coroutine_is_cancelled_and_nothing_of_it_stays(bench: Bench) -> None:
    started, cancelled = asyncio.Event(), asyncio.Event()

    @bench.app.task
    async def endless(ctx: Context) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async def scenario() -> None:
        receipt = await endless.send()
        working = asyncio.create_task(bench.app.work(until_idle=True))
        await started.wait()
        await cancel(bench, receipt.id)
        await cancelled.wait()
        assert await working == 0
        await assert_cancelled(bench, receipt.id)

    bench.run(scenario)


def test_others_beside_a_cancelled_one_go_on(bench: Bench) -> None:
    """Only the run of the cancelled message ends, though one statement asks about all of them."""
    started, release = asyncio.Semaphore(0), asyncio.Event()

    @bench.app.task
    async def waits(number: int) -> int:
        started.release()
        await release.wait()
        return number

    async def scenario() -> None:
        receipts = [await waits.send(number) for number in range(3)]
        working = asyncio.create_task(bench.app.work(until_idle=True))
        for _ in receipts:
            await started.acquire()
        await cancel(bench, receipts[1].id)
        worker = bench.app._workers[0]
        while len(worker._held) > 2:
            await worker._reporter.look()
        release.set()
        assert await working == 2
        assert [await receipts[0].result(), await receipts[2].result()] == [0, 2]
        await assert_cancelled(bench, receipts[1].id)

    bench.run(scenario)


def test_a_thread_gets_an_exception(bench: Bench) -> None:
    started, stopped = threading.Event(), threading.Event()
    seen: list[type[BaseException]] = []

    @bench.app.task
    def busy(ctx: SyncContext) -> None:
        started.set()
        try:
            while True:
                stopped.wait(0.001)
        except BaseException as error:
            seen.append(type(error))
            raise

    async def scenario() -> None:
        receipt = await busy.send()
        working = asyncio.create_task(bench.app.work(until_idle=True))
        await asyncio.to_thread(started.wait)
        await cancel(bench, receipt.id)
        assert await working == 0
        assert seen == [HandlerTimeoutError]
        await assert_cancelled(bench, receipt.id)

    bench.run(scenario)


def test_a_process_is_killed(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "cancelled_tasks.py"
    module.write_text(_ISOLATED)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("ONEFOLD_URL", bench.url)
    app: Any = importlib.import_module("cancelled_tasks").app
    pids = tmp_path / "pid"

    async def scenario() -> None:
        async with app:
            receipt = await app.tasks["isolated"].send(str(pids))
            working = asyncio.create_task(app.work(until_idle=True))
            pulse = None
            while pulse is None:  # its first beat, passed on by the worker
                pulse = await app.progress(receipt.id)
            assert (pulse.percent, pulse.message) == (25.0, "begun")
            await cancel(bench, receipt.id)
            assert await working == 0
            await assert_cancelled(bench, receipt.id)

    try:
        bench.run(scenario)
        with pytest.raises(ProcessLookupError):
            os.kill(int(pids.read_text()), 0)
    finally:
        del sys.modules["cancelled_tasks"]


_ISOLATED = """
import os
import threading
from pathlib import Path

from onefold import App, SyncContext

app = App()


@app.task(isolate=True)
def isolated(ctx: SyncContext, pid_file: str) -> None:
    Path(pid_file).write_text(str(os.getpid()))
    ctx.progress(25, "begun")
    threading.Event().wait()
"""
