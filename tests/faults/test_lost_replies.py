"""A request or its answer is lost: the caller finds out what was done, and nothing is done twice."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Literal

import pytest
from fault_scene import Scene, run, until, until_accepted

from onefold.store.postgres import PostgresStore
from onefold.testing.proxy import Proxy
from onefold.testing.servers import PostgresServer
from onefold.worker import execution

#: More statements than one operation has; the loop ends earlier, with the operation's last statement.
STATEMENTS_MAX = 80
#: Renewals come in between when the machine is slow, so a statement may be missed; then the loop runs again.
SWEEPS_MAX = 5
#: Statements of wake-ups and of the listener, which run at times of their own.
_OF_THE_LISTENER = ("pg_notify", "LISTEN")
_OF_SET_UP = ("set_config(name", "system_identifier")
#: Answers lost under load.
LOST_AT_RANDOM = 25


class Loser:
    """A store's trace that makes the proxy lose its n-th statement, or the answer to it."""

    def __init__(self, kind: Literal["request", "reply"] = "reply") -> None:
        self.proxy: Proxy | None = None
        self._kind = kind
        self._left = 0
        self._passed_over: tuple[str, ...] = _OF_THE_LISTENER
        self.lost: list[str] = []

    def arm(self, number: int, *, set_up: bool = True) -> None:
        """Lose the n-th statement from now; with ``set_up``, those that set up a new connection count too."""
        self._left = number
        self._passed_over = _OF_THE_LISTENER if set_up else _OF_THE_LISTENER + _OF_SET_UP
        self.lost.clear()

    def __call__(self, moment: Literal["before", "after"], statement: str) -> None:
        if moment == "after" or not self._left or any(part in statement for part in self._passed_over):
            return
        self._left -= 1
        if not self._left and self.proxy is not None:
            self.lost.append(" ".join(statement.split())[:60])
            (self.proxy.lose_next_request if self._kind == "request" else self.proxy.lose_next_reply)()


@asynccontextmanager
async def losing(
    server: PostgresServer, url: str, kind: Literal["request", "reply"]
) -> AsyncIterator[tuple[Scene, Loser]]:
    """Yield a scene whose server is reached through a proxy that loses statements and answers."""
    loser = Loser(kind)
    async with Proxy("127.0.0.1", server.port) as proxy:
        scene = Scene(PostgresStore(proxy.through(url), trace=loser))
        await scene.prepare()
        async with scene.app:
            loser.proxy = proxy
            yield scene, loser


async def quiet() -> None:
    """Wait until earlier wake-ups are sent, so that the intended answer is lost."""
    await asyncio.sleep(0.03)


async def send(scene: Scene, key: str) -> None:
    assert not (await scene.send("plain", key)).duplicate
    assert (await scene.send("plain", key, "again")).duplicate


async def send_with_rows(scene: Scene, key: str) -> None:
    """A session lost before the COMMIT wrote nothing and is a typed error; one lost at the COMMIT is resolved."""
    await until_accepted(lambda: scene.order(key))


async def settle(scene: Scene, key: str) -> None:
    """A worker handles two messages without SQL of their own, which are settled together."""
    await scene.app.work(until_idle=True, lease=1.0)


async def handle(scene: Scene, key: str) -> None:
    """A worker handles a message with rows and a child of its own."""
    await scene.app.work(until_idle=True, lease=1.0)


OPERATIONS: dict[str, tuple[list[str], Callable[[Scene, str], Awaitable[None]]]] = {
    "send": ([], send),
    "send with rows": ([], send_with_rows),
    "settle": (["plain", "flaky"], settle),
    "handle": (["pay"], handle),
}


@pytest.mark.parametrize("kind", ["request", "reply"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_whichever_answer_is_lost_it_is_found_out_what_was_done(
    name: str,
    kind: Literal["request", "reply"],
    postgres_server: PostgresServer,
    postgres_url: str,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    """Fault 5: including the COMMITs of a send, a sender's transaction, a settle and a handler."""
    monkeypatch.setattr(execution, "UNAVAILABLE_SECONDS", 0.05)
    waiting, operation = OPERATIONS[name]
    wanted = {"COMMIT"} if name in ("send with rows", "handle") else set()
    lost: list[str] = []

    async def lose_each(scene: Scene, loser: Loser, sweep: int) -> None:
        for number in itertools.count(1):
            assert number < STATEMENTS_MAX
            key = f"{name}-{sweep}-{number}"
            for task in waiting:
                await scene.send(task, key)
            await quiet()
            # Whether a connection is new depends on earlier losses, so a count that includes its set-up may never
            # reach the COMMIT.
            loser.arm(number, set_up=sweep == 0)
            await operation(scene, key)
            if not loser.lost:
                return
            lost.extend(loser.lost)

    async def scenario() -> None:
        async with losing(postgres_server, postgres_url, kind) as (scene, loser):
            for sweep in range(SWEEPS_MAX):
                await lose_each(scene, loser, sweep)
                if wanted <= set(lost):
                    break
            await settled(scene)
            # A claim with a lost answer, and a session that ended during a handler's statement.
            await scene.verdict(crashes_max=2)

    run(scenario)
    record_property("requests and replies lost", len(lost))
    assert len(lost) >= 2
    assert wanted <= set(lost)


async def settled(scene: Scene) -> None:
    """Work until nothing is alive; messages of a claim with a lost answer wait for the end of their lease."""

    async def ended() -> bool:
        await scene.app.work(until_idle=True, lease=1.0)
        return await scene.ended()

    await until(ended, every=0.05)


def test_answers_lost_at_random_under_load_lose_and_repeat_nothing(
    postgres_server: PostgresServer, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault 5: the losses hit random callers while others work."""
    monkeypatch.setattr(execution, "UNAVAILABLE_SECONDS", 0.05)
    chance = random.Random(20_261)

    async def lose(proxy: Proxy) -> None:
        async def lost() -> bool:
            return not proxy.losing

        for _ in range(LOST_AT_RANDOM):
            chance.choice((proxy.lose_next_reply, proxy.lose_next_request))()
            await until(lost, every=0.005)
            await asyncio.sleep(chance.uniform(0.0, 0.06))

    async def produce(scene: Scene, sender: int, losing: asyncio.Task[None]) -> None:
        for count in itertools.count():
            await until_accepted(partial(scene.send_next, sender, count))
            await asyncio.sleep(0.005)
            if losing.done():
                return

    async def scenario() -> None:
        async with losing(postgres_server, postgres_url, "reply") as (scene, loser):
            assert loser.proxy is not None
            working = asyncio.create_task(scene.app.work(lease=2.0, concurrency=5))
            under_fire = asyncio.create_task(lose(loser.proxy))
            await asyncio.gather(*(produce(scene, sender, under_fire) for sender in range(3)))
            await until(scene.ended)
            scene.app.stop_working()
            assert await working > 0
            # Claims with lost answers, and sessions that ended during a handler's statement; chance decides how many of
            # them meet one message.
            await scene.verdict(crashes_max=3)

    run(scenario)
