"""Processes that are replaced: worn ones, ones with old code, and a whole fleet, one after the other."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

from supervisor_scene import Running, Scene, is_alive, wait_until

from onefold import App, State

MODULE = """
from onefold import App, Context
app = App()

@app.task
async def note(ctx: Context, name: str) -> None:
    await ctx.execute("INSERT INTO effect VALUES (?)", "{prefix}" + name)
"""


def test_a_process_that_has_done_its_share_is_replaced(local: Scene) -> None:
    """Fault 21: replaced after a number of messages; its successor starts before it leaves."""
    worker = local.work("--max-messages", "10").wait_ready()
    (first,) = worker.children()
    local.send("note", *((f"{number}",) for number in range(20)))
    local.wait_ended()
    wait_until(lambda: worker.children() not in ([first], []) and not is_alive(first), local.story)
    local.send("note", ("last",))
    local.wait_ended()
    assert local.run_places()[-1][0] != first
    assert worker.stop() == 0
    assert set(local.effects().values()) == {1}
    assert "died" not in worker.printed


def test_a_process_that_takes_too_much_memory_is_replaced(local: Scene) -> None:
    """Fault 21: replaced because of its memory."""
    worker = local.work("--max-memory", "200").wait_ready()
    (first,) = worker.children()
    local.send("grow", (10,))
    local.wait_ended()
    assert worker.children() == [first]
    local.send("grow", (300,))
    wait_until(lambda: not is_alive(first), local.story)
    assert worker.stop() == 0
    assert local.states() == {State.DONE: 2}
    assert "died" not in worker.printed


def test_changed_code_is_loaded_and_broken_code_waited_out(local: Scene, tmp_path: Path) -> None:
    """--reload: running handlers finish, and later messages are handled by the new code."""
    shop = tmp_path / "shop"
    shop.mkdir()
    module = shop / "shop.py"

    def write(text: str) -> None:
        # Replaced by a rename, with a new modification time however coarse the file system's clock is.
        (shop / "next").write_text(text)
        os.utime(shop / "next", ns=(time.time_ns(), time.time_ns()))
        (shop / "next").rename(module)

    write(MODULE.format(prefix="old "))
    worker = local.work("--reload", app="shop:app", cwd=shop).wait_ready()
    local.send("note", ("a",))
    wait_until(lambda: local.effects() == {"old a": 1}, local.story)
    write("this is no Python")
    wait_until(lambda: "waiting until the code changes" in worker.printed, local.story)
    write(MODULE.format(prefix="new "))
    local.send("note", ("b",))
    wait_until(lambda: local.effects() == {"old a": 1, "new b": 1}, local.story)
    assert worker.stop() == 0
    assert worker.printed.count("stopped;") == 2


def test_a_fleet_restarted_one_by_one_under_load_loses_and_repeats_nothing(scene: Scene) -> None:
    """Fault 40: every sent message is done once, however often its workers were stopped meanwhile."""
    fleet = [scene.work("--concurrency", "5").wait_ready() for _ in range(2)]
    sent = scene.ask(lambda app: _send_while(app, lambda: _restart_each(scene, fleet)))
    scene.wait_ended()
    assert [worker.stop() for worker in scene.workers if worker.process.poll() is None] == [0, 0]
    assert scene.effects() == dict.fromkeys(sent, 1)
    assert sent
    # No transaction was lost half-way, so nothing had to run a second time either.
    assert {record.crashes for record in scene.records().values()} == {0}


def _restart_each(scene: Scene, fleet: list[Running]) -> None:
    for number, worker in enumerate(fleet):
        assert worker.stop() == 0, scene.story()
        fleet[number] = scene.work("--concurrency", "5").wait_ready()


async def _send_while(app: App, act: Callable[[], None]) -> list[str]:
    """Send repeatedly until the act is over; return the names of the sent messages."""
    note, sent = app.tasks["note"], []
    acting = asyncio.ensure_future(asyncio.to_thread(act))
    while not acting.done() and len(sent) < 900:
        names = [f"m{len(sent) + number}" for number in range(5)]
        await app.send_many(note.call(name) for name in names)
        sent += names
        await asyncio.sleep(0.03)
    await acting
    return sent
