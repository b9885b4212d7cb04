"""One open app in two processes or threads: a typed error for those that do not own it, no harm to the owner."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fault_scene import Scene, run

from onefold import OnefoldError, StoreError
from onefold.store import Query, State
from onefold.store.open import open_store

#: A child that takes longer hangs.
CHILD_SECONDS_MAX = 20.0
THREADS = 8
#: An owner that was harmed would wait longer than this for an answer.
UNHARMED_SECONDS_MAX = 6.0


def verbs_of(scene: Scene) -> dict[str, Callable[[], Awaitable[Any]]]:
    """Every call by which a program reaches its store."""
    app = scene.app

    async def transaction() -> None:
        async with app.transaction() as opened:
            await opened.execute(scene.sql("INSERT INTO orders VALUES (?)"), "intruder")

    return {
        "send": lambda: scene.app.tasks["plain"].send("intruder"),
        "send_many": lambda: app.send_many([scene.app.tasks["plain"].call("intruder")]),
        "transaction": transaction,
        "find": lambda: app.find(Query()),
        "count": app.count,
        "fetch": lambda: app.store.fetch("SELECT 1"),
        "claim": lambda: app.store.claim(["default"], types=["plain"], limit=1, lease=30, worker="intruder"),
        "work": lambda: app.work(until_idle=True),
    }


def in_a_child(work: Callable[[], str]) -> str:
    """Run this in a forked process and return its result; a death or a hang is a result too."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            said = work()
        except BaseException:
            said = traceback.format_exc()
        os.write(writing, said.encode())
        # Skip the exit handlers and the buffers inherited from the parent: they must run only there.
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        heard = pipe.read().decode()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return heard if status == 0 else f"the child ended with {status}: {heard}"


def refusals(verbs: dict[str, Callable[[], Awaitable[Any]]], hint: str) -> str:
    """Return the calls that were not refused as expected, or an empty text."""
    wrong = []
    for name, verb in verbs.items():
        try:
            answer = asyncio.run(asyncio.wait_for(verb(), CHILD_SECONDS_MAX))
        except StoreError as error:
            if hint not in str(error):
                wrong.append(f"{name}: {error}")
        except BaseException as error:
            wrong.append(f"{name}: {type(error).__name__}: {error}")
        else:
            wrong.append(f"{name} returned {answer}")
    return "\n".join(wrong)


async def goes_on(scene: Scene) -> None:
    """Check that the owner of the app continues, and that nothing of the others was stored."""
    await scene.send("pay", "k")
    await scene.app.work(until_idle=True)
    records = await scene.verdict()
    assert "intruder" not in {one.envelope.subject for one in records}
    assert await scene.app.store.fetch("SELECT count(*) FROM orders") == [(0,)]


def test_a_child_that_was_forked_from_an_open_app_is_refused(store_url: str) -> None:
    """Fault 41: every call raises a typed error with advice; the parent's connections are not touched."""

    async def scenario() -> None:
        scene = Scene(open_store(store_url))
        await scene.prepare()
        async with scene.app:
            await scene.send("pay", "before")
            assert in_a_child(lambda: refusals(verbs_of(scene), "fork")) == ""
            await goes_on(scene)

    run(scenario)


def test_a_child_that_ends_or_closes_does_no_harm_to_its_parent(store_url: str) -> None:
    """Fault 41: closing an inherited descriptor must not drop the parent's locks, nor end its sessions."""

    def close(scene: Scene) -> str:
        with contextlib.suppress(OnefoldError):
            asyncio.run(asyncio.wait_for(scene.app.close(), CHILD_SECONDS_MAX))
        return "closed"

    async def scenario() -> None:
        scene = Scene(open_store(store_url))
        await scene.prepare()
        async with scene.app:
            async with scene.app.transaction(timeout=30) as transaction:
                await transaction.execute(scene.sql("INSERT INTO effect VALUES (?, ?, 1)"), "x", "y")
                assert in_a_child(lambda: close(scene)) == "closed"
                assert in_a_child(lambda: "nothing") == "nothing"
                began = asyncio.get_running_loop().time()
                await transaction.execute("DELETE FROM effect")
            await goes_on(scene)
            assert asyncio.get_running_loop().time() - began < UNHARMED_SECONDS_MAX

    run(scenario)


def test_a_child_can_open_an_app_of_its_own(store_url: str) -> None:
    """Fault 41: the error advises this."""

    async def send(url: str) -> str:
        scene = Scene(open_store(url))
        async with scene.app:
            return (await scene.send("plain", "from the child")).id

    async def scenario() -> None:
        scene = Scene(open_store(store_url))
        await scene.prepare()
        async with scene.app:
            identity = in_a_child(lambda: asyncio.run(send(store_url)))
            scene.journal.invoke("child", "plain:from the child")
            await scene.app.work(until_idle=True)
            (record,) = await scene.records()
            assert (record.envelope.id, record.state) == (identity, State.DONE)

    run(scenario)


@pytest.mark.parametrize("at_once", [1, THREADS])
def test_an_app_used_from_another_thread_is_refused(store_url: str, at_once: int) -> None:
    """Fault 41: only the event loop in which it was opened may use it; nothing is corrupted."""
    said: list[str] = []

    async def scenario() -> None:
        scene = Scene(open_store(store_url))
        await scene.prepare()
        async with scene.app:
            threads = [
                threading.Thread(target=lambda: said.append(refusals(verbs_of(scene), "event loop")))
                for _ in range(at_once)
            ]
            for thread in threads:
                thread.start()
            # Meanwhile its owner works.
            for number in range(20):
                await scene.send("plain", f"meanwhile-{number}")
            for thread in threads:
                await asyncio.to_thread(thread.join)
            await goes_on(scene)

    run(scenario)
    assert said == [""] * at_once


def test_an_app_opened_in_another_event_loop_is_refused(store_url: str) -> None:
    """Fault 41: opened in one ``asyncio.run`` and used in the next, for example."""
    with asyncio.Runner() as owner:
        scene = Scene(open_store(store_url))
        owner.run(scene.prepare())
        owner.run(scene.app.open())
        assert in_a_thread(lambda: refusals(verbs_of(scene), "event loop")) == ""
        owner.run(goes_on(scene))
        owner.run(scene.app.close())


def in_a_thread(work: Callable[[], str]) -> str:
    """Run this in a thread, where no event loop runs, and return its result."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()
