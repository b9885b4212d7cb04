"""A store in use with very many messages, and one of everything that workers and operators ask of it.

The messages are those of all kinds of noise of the benchmarks together; nothing of it can run.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.contender import Mode, make_job
from benchmarks.engines import Engine
from benchmarks.filling import name_of
from benchmarks.noise import NOISES, fill
from benchmarks.noisy import CAPPED, FAIR, NOTIFY, ORDERED, RATED, SLEEPER, Example, Noisy
from benchmarks.ours import QUEUE, make_sleeper, not_here

from onefold import App, Rate, limits
from onefold.clock import Ids, SystemClock, system_random, to_datetime
from onefold.message.envelope import Envelope
from onefold.operations import runs
from onefold.store import (
    Act,
    Again,
    Dead,
    Done,
    Failure,
    HandBack,
    Lane,
    Lease,
    Outcome,
    Parked,
    PutOptions,
    Query,
    Said,
    State,
)
from onefold.store.journal_lines import Line, LineKind
from onefold.testing.clock import FakeClock

#: The parts of all noise that make a little more than a million messages, and a tenth of that.
LARGE, SMALL = 0.25, 0.025
#: Examples of these kinds are claimed when they are made, so they are made before other messages could be claimed; the
#: one with the most gates that a claim would walk past is made last of those.
_FIRST = ("keys without a token", "keys without a place", "parked", "dead", "done", "back-off")
#: The running messages of this kind are at the same keys as the waiting ones only if they are numbered from 1 on.
_NUMBERED_FROM_ONE = "keys without a place"
#: Between the first numbers of two kinds: more than there are messages of one kind, and more than the milliseconds that
#: it takes to make all of them, because the ids of copies are made of both.
_NUMBERS = 2_000_000
#: Acts of operators that are kept, of which a purge looks at the oldest.
_ACTS = 200_000
_LEASE = 30.0
_ACT = Act(actor="ada", reason="a test")
_FAILED = Failure(reason="failed", error_type="ValueError", error_message="no")
_WHO = {"actor": "ada", "reason": "a test"}
#: A claim walks past some thousand shut gates at most, and the next one goes on from there: so many have passed all.
_IN_VAIN_MAX = 8
_CLAIMS_MAX = 80
#: A value of a journal that lies in parts.
_LARGE_BYTES = 3_000_000
#: Fewer than there are of anything in the smaller store that is purged.
_PURGED = 200


async def fill_with_all_noise(engine: Engine, url: str, share: float) -> None:
    """Make ``share`` of every kind of noise in one store."""
    sender = Noisy(url, Mode.NOISY)
    await sender.setup()
    numbers = itertools.count(1)
    kinds = sorted(NOISES, key=lambda one: _FIRST.index(one.title) if one.title in _FIRST else len(_FIRST))

    async def example(kind: Example, _: int) -> str:
        return await sender.example(kind=kind, seq=-next(numbers))

    try:
        for place, noise in enumerate(kinds, start=1):
            first = 1 if noise.title == _NUMBERED_FROM_ONE else place * _NUMBERS
            await fill(engine, url, noise, share, example, first)
    finally:
        await sender.close()
    acts, messages = (name_of(engine, table) for table in ("act", "message"))
    columns = "message_id, kind, actor, reason"
    engine.execute(
        url,
        f"INSERT INTO {acts} (at, {columns}) "
        f"SELECT created_at, id, 'cancel', 'ada', 'noise' FROM {messages} LIMIT {round(share * _ACTS)}",
    )
    engine.tidy(url)


class Scene:
    """Asks one open app for everything, in rounds that find the store as the first one did."""

    def __init__(self, url: str) -> None:
        self.clock = FakeClock(to_datetime(SystemClock().now()))
        self.app = App(url, clock=self.clock)
        # So that no two scenes on one store have the same keys.
        self._numbers = itertools.count(self.clock.now())
        self._ids = Ids(self.clock, system_random())
        self._declare()

    def _declare(self) -> None:
        async def handler(seq: int, t0: int, to: str, template: str) -> None: ...

        task = self.app.task
        self.tasks: dict[str, Any] = {
            NOTIFY: task(name=NOTIFY, key="{seq}")(handler),
            ORDERED: task(name=ORDERED, key="{seq}", ordering_key="{to}")(handler),
            FAIR: task(name=FAIR, key="{seq}", fair_key="{to}")(handler),
            RATED: task(name=RATED, key="{seq}", gate="{to}", rate_each=Rate(1, per=3_600.0))(handler),
            CAPPED: task(name=CAPPED, key="{seq}", gate="{to}", max_running_each=1)(handler),
            "skipping": task(name="skipping", key="{seq}", ordering_key="{to}", on_failure="skip")(handler),
            "few": task(name="few", key="{seq}", gate="{to}", max_running=3, rate=Rate(1_000))(handler),
            SLEEPER: self.app.workflow(name=SLEEPER, key="{seq}")(make_sleeper(not_here)),
        }

    def _job(self, to: str) -> Sequence[Any]:
        seq = next(self._numbers)
        return make_job(seq)._replace(to=f"{to}{seq}" if to.endswith("-") else to)

    # what senders and workers do

    async def send(self) -> None:
        """Send messages of every kind, some of them twice."""
        app, notify = self.app, self.tasks[NOTIFY]
        one = self._job("x")
        for _ in range(2):
            await notify.send(*one)
        many = [self._job("x") for _ in range(60)]
        for _ in range(2):
            await app.send_many(notify.call(*job) for job in many[:30])
        await app.send_many(notify.call(*job) for job in many)
        for n in range(10):
            await notify.options(priority=n).send(*self._job("x"))
        for _ in range(3):
            await notify.options(deduplicate="same", deduplicate_for=60.0).send(*self._job("x"))
            self.clock.advance(40.0)
        await notify.options(delay=0.5).send(*self._job("x"))
        await notify.options(queue="second").send(*self._job("x"))
        await self.send_to_gates()
        numbered = f"numbered{next(self._numbers)}"
        for n in (2, 1, 3):
            await self.tasks[ORDERED].options(sequence=n).send(*self._job(numbered))
        envelopes = [self._envelope() for _ in range(3)]
        for _ in range(2):
            await app.store.put(envelopes, PutOptions(batch_key=envelopes[0].id))

    async def send_to_gates(self) -> None:
        """Send messages to lines and crowds, also between those of the noise."""
        for name in (FAIR, RATED, CAPPED):
            await self.app.send_many(self.tasks[name].call(*self._job(f"{place}-")) for place in ("a", "shut-3/", "z"))
        line = f"line{next(self._numbers)}"
        for name in (ORDERED, "skipping", "few"):
            await self.app.send_many(self.tasks[name].call(*self._job(line)) for _ in range(4))

    def _envelope(self, **fields: Any) -> Envelope:
        id_ = self._ids.make()
        key = f"{next(self._numbers)}"
        common = {"correlation_id": id_, "causation_id": id_, "subject": "", "payload_inline": b"{}", "queue": QUEUE}
        return Envelope(**{"id": id_, "message_type": NOTIFY, "idempotency_key": key, **common, **fields})

    async def claim(self, lane: Lane = Lane.ANY, *, limit: int = 20, **given: Any) -> list[Lease]:
        registry = self.app.registry
        asked = {"types": registry.types(), "lease": _LEASE, "worker": "w", "gatings": registry.gatings, **given}
        return await self.app.store.claim([QUEUE, "second"], limit=limit, lane=lane, **asked)

    async def settle_in_turn(self, leases: Sequence[Lease], outcomes: Sequence[Outcome]) -> None:
        """Settle leases, each with the next outcome."""
        await self.app.store.settle(list(zip(leases, itertools.cycle(outcomes), strict=False)))

    async def finish(self, **given: Any) -> None:
        """Claim and settle until nothing of this scene is due."""
        in_vain = 0
        for _ in range(_CLAIMS_MAX):
            leases = await self.claim(limit=100, **given)
            await self.settle_in_turn(leases, [Done(b"null")])
            in_vain = 0 if leases else in_vain + 1
            if in_vain == _IN_VAIN_MAX:
                return
        raise AssertionError("some messages of the scene can always be claimed")

    async def work(self) -> None:
        """Claim in every lane, and end claims in every way."""
        store = self.app.store
        assert await self.claim(Lane.PROBATION) == []
        leases = await self.claim(Lane.MAIN, limit=40)
        assert len(leases) == 40
        assert all(await store.extend(leases, lease=_LEASE, starting=True))
        await store.report([(lease, Said(50.0, "half")) for lease in leases[:5]])
        await store.report([(lease, None) for lease in leases])
        await store.progress([lease.id for lease in leases])
        child = self._envelope(
            correlation_id=leases[0].envelope.correlation_id, causation_id=leases[0].id, message_type=NOTIFY
        )
        outcomes = [
            Done(b"null", sends=(child,)),
            Again(0.5, _FAILED),
            Again(0.0, None, counted=False, crashed=True),
            HandBack(),
            Dead(_FAILED),
        ]
        await self.settle_in_turn(leases[:5], outcomes)
        self.root = leases[0].id
        await self.settle_in_turn(leases[5:], [Done(b"null")])
        async with store.transaction() as transaction:
            await transaction.settle([(lease, HandBack()) for lease in leases[:2]])
        alone = await self.claim(limit=1)
        async with store.transaction() as transaction:
            await transaction.conclude([(alone[0], Done(b"null"))])
        await self.fail_in_lines()
        crashed = await self.claim(Lane.PROBATION)
        assert crashed
        await self.settle_in_turn(crashed, [Done(b"null")])
        taken = await self.claim(limit=10, lease=1.0, thorough=False)
        assert taken
        self.clock.advance(2.0)
        assert await self.claim(limit=10)
        self.clock.advance(_LEASE + 1)
        for thorough in (False, True):
            await self.finish(thorough=thorough)

    async def fail_in_lines(self) -> None:
        """Let heads of lines, and messages in crowds, fail or crash."""
        await self.send_to_gates()
        for name in (FAIR, RATED, CAPPED, ORDERED, "skipping", "few"):
            for outcome in (Again(5.0, _FAILED), Again(0.0, None, counted=False, crashed=True), HandBack()):
                await self.settle_in_turn(await self.claim(Lane.MAIN, types=[name]), [outcome])
                await self.settle_in_turn(await self.claim(types=[name], limit=1, thorough=False), [HandBack()])
        adopted = await self.claim(types=[NOTIFY], limit=2)
        await self.settle_in_turn(adopted, [HandBack("skipping:adopted", ordered=True)])

    async def run_workflows(self) -> None:
        """Park runs, wake them in every way, and operate on them."""
        app, store, types = self.app, self.app.store, [f"{SLEEPER}@1"]
        assert types[0] in app.registry.types()
        await app.send_many(self.tasks[SLEEPER].call(*self._job("x"), None) for _ in range(6))
        leases = await self.claim(types=types)
        assert len(leases) == 6
        step = Line("charge#1", LineKind.RESULT, b"1")
        for lease in leases:
            await store.record(lease, [step, Line("note#1", LineKind.RESULT, b"2" * _LARGE_BYTES)])
        timer = Line("go#1", LineKind.TIMER, b"null")
        await store.settle([(lease, Parked(None, lease.wake, 1, steps=(timer,))) for lease in leases[:5]])
        await store.settle([(leases[5], Parked(None, leases[5].wake, 0, failure=_FAILED))])
        ids = [lease.id for lease in leases]
        assert await app.signal(ids[0], "go", 1)
        assert await app.signal(ids[0], "go", 1)
        assert await app.resume(ids[5], **_WHO)
        assert await app.restart(ids[1], from_step="charge#1", **_WHO)
        assert await app.cancel(ids[2], **_WHO)
        async with store.transaction() as transaction:
            await transaction.record(ids[3], [Line("by hand", LineKind.RESULT, b"1")], act=_ACT)
        for id_ in ids:
            await store.steps(id_)
            await app.chronicle(id_)
            await app.saga_status(id_)
            await app.ledger(id_)
        awake = await self.claim(types=types)
        assert len(awake) >= 3
        await self.settle_in_turn(awake, [Dead(_FAILED)])
        await store.record(awake[0].id, [Line("go#2", LineKind.SIGNAL, b"1")])
        assert await app.restart(awake[0].id, from_step="note#1", **_WHO) or True
        await app.cancel(ids[4], **_WHO)
        # It was never claimed, so all of it is purged at once.
        never = await self.tasks[SLEEPER].send(*self._job("x"), None)
        await app.signal(never.id, "go", 1)
        await app.cancel(never.id, **_WHO)
        await self.finish()

    # what operators do

    async def operate(self) -> None:
        """Read everything that a command reads, and do what a command does."""
        app, store = self.app, self.app.store
        now = await store.now()
        letters = await app.find(Query(states=(State.DEAD,), limit=20))
        for query in _queries(letters[0].envelope.id, [letter.envelope.id for letter in letters]):
            await app.find(query)
        await app.chain(self.root)
        for letter in letters[:3]:
            await store.attempts(letter.envelope.id)
            await app.chronicle(letter.envelope.id)
        ids = [letter.envelope.id for letter in letters]
        assert await app.redrive(ids[:5], **_WHO) == ids[:5]
        for id_ in ids[:3]:
            assert await app.cancel(id_, **_WHO)
        async for dead in app.dead_letters():
            assert await dead.discard(**_WHO)
            break
        await _some(runs.runs(store))
        await _some(runs.runs(store, states=(State.PARKED,), message_type=SLEEPER, created=(now, limits.INSTANT_MAX)))
        await runs.held_by(store, "w")
        await app.schedule(self.tasks[NOTIFY].call(*self._job("x")), every=60.0, mode="rate", name="minutely")
        await app.schedules()
        await app.unschedule("minutely")
        async with store.transaction() as transaction:
            for version in (0, 1):
                await transaction.register("kind", "name", b"1", version=version)
            await transaction.register("kind", "name", None, version=2)
        await store.registered("kind", "name")

    async def count(self) -> None:
        """Count what is counted over whole tables."""
        await self.app.count()
        await self.app.dead_groups()

    async def purge(self, *, later: float = 0.0) -> None:
        """Purge as workers do, now or so many seconds later."""
        self.clock.advance(later)
        for _ in range(3):
            async with self.app.store.transaction() as transaction:
                await transaction.purge(limit=_PURGED)

    async def round(self) -> None:
        """Do one of everything."""
        await self.send()
        await self.work()
        await self.run_workflows()
        await self.operate()
        await self.finish()
        await self.purge()

    async def play(self, rounds: int) -> None:
        """Play the scene so many times, then purge at times when more is over."""
        async with self.app:
            for _ in range(rounds):
                await self.round()
            await self.count()
            # The bodies of messages are kept for less time than the rest of them.
            for days in (12, 20):
                await self.purge(later=days * 86_400.0)

    async def ask(self, query: Query) -> None:
        """Ask one query."""
        async with self.app:
            await self.app.find(query)


def _queries(after: str, ids: Sequence[str]) -> list[Query]:
    """Return one query of each kind that a command or a worker makes, from the beginning and from a message on."""
    kinds = [
        Query(),
        Query(states=runs.OPEN, limit=limits.PAGE_MAX),
        Query(states=(State.PARKED,), limit=limits.PAGE_MAX),
        Query(states=(State.LEASED,)),
        Query(states=(State.DEAD,)),
        Query(states=(State.DEAD,), queue=QUEUE),
        Query(states=(State.DEAD,), message_type=NOTIFY),
        Query(states=runs.OPEN, runs=True, limit=limits.PAGE_MAX),
        Query(worker="w", states=(State.LEASED,)),
        Query(crashes=1, states=(State.SCHEDULED,)),
    ]
    return [Query(ids=tuple(ids)), *kinds, *(replace(one, after=after) for one in kinds)]


#: Queries of commands and workers that read messages which they do not return, and why; they are to be repaired.
SLOW = {
    "the expirer's page of scheduled messages": (
        Query(states=(State.SCHEDULED,)),
        "a page of scheduled messages passes over all leased and parked ones that are older",
    ),
    "messages of one type": (
        Query(message_type="none"),
        "no index finds messages by their type: the command `events` and the check of a mistyped type read all of them",
    ),
    "runs that have ended": (
        Query(states=(State.DONE,), runs=True),
        "no index finds runs that have ended: `runs list` with their states reads all messages",
    ),
}


async def _some(pages: AsyncIterator[object]) -> None:
    """Read what fills two pages, and no more."""
    number = 0
    async for _ in pages:
        number += 1
        if number > limits.PAGE_MAX:
            return
