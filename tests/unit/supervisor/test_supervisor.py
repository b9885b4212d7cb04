"""Settings that a supervisor refuses before it starts anything, and texts that it prints."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from onefold import App, ConfigurationError, Query, limits
from onefold.child_process import unnamed_file
from onefold.cli.durations import lasting
from onefold.clock import SystemClock
from onefold.store import Lane, Record
from onefold.supervisor.health import parse_address
from onefold.supervisor.ipc import WorkerOrders
from onefold.supervisor.process import WorkerProcess
from onefold.supervisor.processes import WorkerProcesses
from onefold.supervisor.settings import SupervisorSettings
from onefold.supervisor.shared_memory import Board
from onefold.supervisor.supervisor import Supervisor
from onefold.supervisor.watchdog import Watchdog
from onefold.testing.clock import FakeClock
from onefold.testing.contracts.transactions import one_turn
from onefold.worker.settings import WorkerSettings
from onefold.worker.worker_list import describe, worker_name


def test_a_store_in_memory_is_refused() -> None:
    async def scenario() -> None:
        async with App("sqlite:///:memory:") as app:
            settings = SupervisorSettings(where="shop:app", queues=["default"])
            with pytest.raises(ConfigurationError, match=r"app\.work\(\)"):
                Supervisor(app.store, SystemClock(), random.Random(1), app.tasks, settings)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("processes", 0),
        ("processes", 1_000),
        ("concurrency", 0),
        ("lease_seconds", 0.1),
        ("stop_seconds", -1.0),
        ("stall_seconds", 0.0),
        ("queues", ["Not A Queue"]),
    ],
)
def test_settings_outside_their_range_are_refused(name: str, value: Any) -> None:
    given: dict[str, Any] = {"where": "shop:app", "queues": ["default"], name: value}
    with pytest.raises(ConfigurationError, match=name.partition("_")[0].rstrip("s")):
        SupervisorSettings(**given)


def test_a_lease_is_looked_after_several_times_before_it_is_over() -> None:
    assert SupervisorSettings(where="", queues=[], lease_seconds=1.0).tick_seconds < 1.0 / 5
    assert SupervisorSettings(where="", queues=[], lease_seconds=3_600.0).tick_seconds == 1.0


@pytest.mark.parametrize("address", ["8080", "localhost", "localhost:", ":8080", "localhost:http", "localhost:70000"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigurationError, match="HOST:PORT"):
        parse_address(address)


def test_addresses_of_both_kinds_are_read() -> None:
    assert parse_address("127.0.0.1:0") == ("127.0.0.1", 0)
    assert parse_address("[::1]:8080") == ("::1", 8080)


@pytest.mark.parametrize(
    ("seconds", "said"), [(0, "0s"), (59.4, "59s"), (184, "3m 04s"), (18_540, "5h 09m"), (183_600, "2d 03h")]
)
def test_durations_are_said_as_people_say_them(seconds: float, said: str) -> None:
    assert lasting(seconds) == said


@pytest.mark.parametrize("host", ["web-1", "Büro PC.local", "---", ""])
def test_every_host_makes_a_name_that_is_allowed(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: host)
    settings = WorkerSettings(worker_name(2**22, random.Random(1)), ["default"])
    assert describe(settings, 0, 0, running=0, settled=0).name == settings.name


def test_a_process_that_ends_while_another_is_helped_does_not_end_the_watch(tmp_path: Path) -> None:
    """When the store answers at last, the next process in turn may be gone, with its shared memory."""

    async def process(name: str, *command: str) -> WorkerProcess:
        child = await asyncio.create_subprocess_exec(*command)
        orders = WorkerOrders(
            version="1",
            parent=os.getpid(),
            name=name,
            queues=["default"],
            concurrency=1,
            lease_seconds=30.0,
            stop_seconds=1.0,
            until_idle=False,
            lane=Lane.MAIN,
            capacity=1,
            beat_seconds=1.0,
            verbose=False,
        )
        made = WorkerProcess(child, orders, Board.create(1), unnamed_file("faults"))
        made.ready.set()
        return made

    async def scenario() -> None:
        clock = FakeClock()
        async with App(f"sqlite:///{tmp_path / 'onefold.db'}", clock=clock) as app:
            settings = SupervisorSettings(where="shop:app", queues=["default"], stall_seconds=limits.DAY)
            processes = WorkerProcesses(app.store, clock, random.Random(1), app.tasks, settings)
            hanging, ending = await process("hanging", "sleep", "60"), await process("ending", "sleep", "60")
            processes.by_name = {one.name: one for one in (hanging, ending)}
            helped: list[str | None] = []
            find = app.store.find

            async def find_while_the_other_ends(query: Query) -> list[Record]:
                helped.append(query.worker)
                if query.worker == "hanging" and ending.code is None:
                    ending._signal(signal.SIGKILL)
                    await ending._process.wait()
                    ending.close()
                return await find(query)

            app.store.find = find_while_the_other_ends  # type: ignore[method-assign]
            watching = asyncio.create_task(Watchdog(processes, app.store, clock, settings).run())
            try:
                # Each renewal asks twice: which leases to renew, and which messages to hand back.
                while helped.count("hanging") < 6 and not watching.done():
                    clock.advance(0.05)
                    await one_turn()
                assert "ending" not in helped
                assert not watching.done()
            finally:
                watching.cancel()
                hanging._signal(signal.SIGKILL)
                await hanging._process.wait()
                hanging.close()

    asyncio.run(asyncio.wait_for(scenario(), 30))
