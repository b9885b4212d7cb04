"""Random lives of messages on real stores, compared step by step with a model in plain Python."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from onefold import limits
from onefold.clock import MICROSECONDS
from onefold.message.codec import fingerprint_of
from onefold.message.envelope import UNKEYED, Envelope
from onefold.store import Act, Again, Dead, Done, Failure, HandBack, Lease, Outcome, PutOptions, Query, State, Store
from onefold.store.open import open_store
from onefold.store.sqlite import SQLiteStore
from onefold.testing import FakeClock
from onefold.testing.model import Model

Answer = TypeVar("Answer")

LEASE = 30.0
_FAILURE = Failure(reason="failed", error_type="ValueError", error_message="no")
_ACT = Act(actor="ada", reason="a test")

_keys = st.sampled_from([None, "a", "b"])
_payloads = st.sampled_from([b"[1]", b"[2]"])
_deduplication_keys = st.sampled_from([None, None, "d", "e"])
_delays = st.sampled_from([0, 0, 5 * MICROSECONDS])
_outcomes = st.sampled_from(
    [
        Done(b"1", key_window=100.0, body_retention=40.0),
        Done(b"2"),
        Again(5.0, _FAILURE),
        Again(0.0, None, counted=False),
        Again(1.0, _FAILURE, counted=False),
        Dead(_FAILURE, key_window=100.0, body_retention=40.0),
        Dead(_FAILURE),
        HandBack(),
    ]
)
_four_outcomes = st.lists(_outcomes, min_size=4, max_size=4)
#: Indexes from the end of a list, the latest first.
_picks = st.integers(min_value=0, max_value=7)
_later = st.sampled_from([0.0, 0.0, 45.0, 100.0])


@dataclass
class Scene:
    """An open store, its clock, and its event loop."""

    store: Store
    clock: FakeClock
    loop: asyncio.AbstractEventLoop
    close: bool

    def run(self, call: Coroutine[Any, Any, Answer]) -> Answer:
        return self.loop.run_until_complete(call)


_numbers = itertools.count()


class StoreMachine(RuleBasedStateMachine):
    """Messages of their own queue and type, so that many machines may share one database."""

    def __init__(self, scene: Scene) -> None:
        super().__init__()
        self.scene = scene
        self.store = scene.store
        self.number = next(_numbers)
        self.name = f"machine-{self.number}"
        self.model = Model(now=scene.clock.now())
        self.sent = itertools.count()
        self.ids: list[str] = []
        self.leases: list[Lease] = []

    def teardown(self) -> None:
        if self.scene.close:
            self.scene.run(self.store.close())
            self.scene.loop.close()

    def envelope(self, key: str | None, payload: bytes, **fields: Any) -> Envelope:
        # Ids rise in the order of sending, so that the same steps always claim in the same order.
        id_ = f"{self.number:08x}-0000-7000-8000-{next(self.sent):012x}"
        return Envelope(
            id=id_,
            message_type=self.name,
            queue=self.name,
            idempotency_key=key or f"{UNKEYED}{id_}",
            correlation_id=self.name,
            causation_id=id_,
            subject="subject",
            payload_inline=payload,
            fingerprint=fingerprint_of(payload),
            **fields,
        )

    def some_id(self, pick: int) -> str:
        return self.ids[-1 - pick % len(self.ids)]

    # Verbs.

    @initialize(keys=st.lists(_keys, min_size=1, max_size=4))
    def begin(self, keys: list[str | None]) -> None:
        for key in keys:
            self.put(key, b"[1]", None, 0, False, False)

    @rule(
        key=_keys,
        payload=_payloads,
        deduplicate=_deduplication_keys,
        delay=_delays,
        redrive=st.booleans(),
        inside=st.booleans(),
    )
    def put(
        self, key: str | None, payload: bytes, deduplicate: str | None, delay: int, redrive: bool, inside: bool
    ) -> None:
        options = PutOptions(if_dead="redrive" if redrive else "keep")
        sent = self.envelope(
            key, payload, deduplication_key=deduplicate, deduplicate_for=60 * MICROSECONDS, delay=delay
        )
        stored = self.scene.run(self._put_inside(sent, options) if inside else self.store.put([sent], options))[0]
        expected = self.model.put(sent, options)
        assert (stored.id, stored.duplicate, stored.clash) == (expected.id, expected.duplicate, expected.clash)
        if self.model.messages[stored.id].lease_until > self.model.now:
            assert stored.state is expected.state
        self.ids.append(stored.id)

    async def _put_inside(self, sent: Envelope, options: PutOptions) -> list[Any]:
        async with self.store.transaction() as transaction:
            return await transaction.put([sent], options)

    @rule(pick=_picks)
    def put_again(self, pick: int) -> None:
        """After a lost answer, the sender puts the same message again."""
        message = self.model.messages.get(self.some_id(pick))
        if message is None or message.envelope.deduplication_key is not None:
            return
        expected = self.model.put(message.envelope, PutOptions())
        stored = self.scene.run(self.store.put([message.envelope]))[0]
        assert (stored.id, stored.duplicate, stored.clash) == (expected.id, expected.duplicate, expected.clash)

    @rule(limit=st.sampled_from([1, 2, 100]), after=st.sampled_from([0.0, 0.0, 5.0, LEASE]))
    def claim(self, limit: int, after: float) -> None:
        """If the time is as long as a lease, the leases held so far go stale."""
        self.time_passes(after)
        claimed = self.scene.run(
            self.store.claim([self.name], types=[self.name], limit=limit, lease=LEASE, worker="grace")
        )
        self.model.claim(claimed, limit, LEASE)
        self.leases += claimed

    @rule(picks=st.lists(_picks, min_size=1, max_size=3, unique=True))
    def extend(self, picks: list[int]) -> None:
        some = self._some_leases(picks)
        held = self.scene.run(self.store.extend(some, lease=LEASE))
        for lease, mine in zip(some, held, strict=True):
            self.model.extend(lease, mine, LEASE)

    @rule(picks=st.lists(_picks, min_size=1, max_size=4, unique=True), outcomes=_four_outcomes, child=st.booleans())
    def settle(self, picks: list[int], outcomes: list[Outcome], child: bool) -> None:
        """Settle one or several at once, with leases that are held, were lost or were settled before."""
        self._settle(list(zip(self._some_leases(picks), outcomes, strict=False)), child)

    def _some_leases(self, picks: list[int]) -> list[Lease]:
        """Return leases without repetition, usually the latest."""
        return [self.leases[-1 - pick] for pick in picks if pick < len(self.leases)]

    def _settle(self, settlements: list[tuple[Lease, Outcome]], child: bool) -> None:
        if child:
            settlements = [(lease, self._with_child(lease, outcome)) for lease, outcome in settlements]
        won = self.scene.run(self.store.settle(settlements))
        assert won == [self.model.settle(lease, outcome) for lease, outcome in settlements]
        for lease, _ in settlements:
            if lease.id in self.model.messages:
                attempts = self.scene.run(self.store.attempts(lease.id))
                assert len(attempts) == self.model.messages[lease.id].failures

    def _with_child(self, lease: Lease, outcome: Outcome) -> Outcome:
        if not isinstance(outcome, Done):
            return outcome
        child = self.envelope(f"{lease.id}/0", b"[3]")
        return Done(outcome.result, (child,), outcome.key_window, outcome.body_retention)

    @rule(key=_keys, outcome=_outcomes, operator=st.sampled_from([None, "redrive", "discard"]), later=_later)
    def live(self, key: str | None, outcome: Outcome, operator: str | None, later: float) -> None:
        """A whole life at once, and steps after it that rarely follow each other by chance."""
        self.put(key, b"[1]", None, 0, False, False)
        id_ = self.ids[-1]
        self.claim(100, 0.0)
        self._settle([(lease, outcome) for lease in self.leases if lease.id == id_][-1:], False)
        self.time_passes(later)
        if later:
            self.put(key, b"[1]", None, 0, False, False)
        if operator is not None:
            self.operate(operator, self.ids[::-1].index(id_))

    @rule(seconds=st.sampled_from([1.0, 5.0, LEASE, 45.0, 100.0, 3_600.0, limits.KEY_WINDOW]))
    def time_passes(self, seconds: float) -> None:
        self.scene.clock.advance(seconds)
        self.model.now = self.scene.clock.now()

    @rule(verb=st.sampled_from(["redrive", "discard", "cancel"]), pick=_picks)
    def operate(self, verb: str, pick: int) -> None:
        id_ = self.some_id(pick)
        to, follow = {
            "redrive": (State.SCHEDULED, self.model.redrive),
            "discard": (State.DISCARDED, self.model.discard),
            "cancel": (State.CANCELLED, self.model.cancel),
        }[verb]
        assert self.scene.run(self._move(id_, to)) is follow(id_)

    async def _move(self, id_: str, to: State) -> bool:
        async with self.store.transaction() as transaction:
            return await transaction.move([id_], to, _ACT) == [id_]

    @rule()
    def purge(self) -> None:
        self.scene.run(self._purge())
        self.model.purge()

    async def _purge(self) -> None:
        while True:
            async with self.store.transaction() as transaction:
                if (await transaction.purge()).total == 0:
                    return

    # Invariants.

    @invariant()
    def store_and_model_agree(self) -> None:
        """States, counts and results are the same, and no fence has gone down."""
        found = self.scene.run(self.store.find(Query(queue=self.name, limit=1_000)))
        assert {record.envelope.id for record in found} == self.model.messages.keys()
        for record in found:
            message = self.model.messages[record.envelope.id]
            assert message.allows(record, self.model.now), (record, message)
        alive = [r.envelope.idempotency_key for r in found if r.envelope.keyed and not r.state.ended]
        assert len(alive) == len(set(alive)), "two messages with one key are alive"


def _in_memory() -> Scene:
    """A store of its own for each example, without threads and without a file."""
    loop, clock = asyncio.new_event_loop(), FakeClock()
    store = SQLiteStore(":memory:", clock=clock, inline=True)
    loop.run_until_complete(store.open())
    return Scene(store, clock, loop, close=True)


@contextmanager
def _shared(url: str) -> Iterator[Callable[[], Scene]]:
    """One store for all examples, because connecting to a server takes longer than an example."""
    loop, clock = asyncio.new_event_loop(), FakeClock()
    store = open_store(url, clock=clock)
    loop.run_until_complete(store.migrate())
    loop.run_until_complete(store.open())
    try:
        yield lambda: Scene(store, clock, loop, close=False)
    finally:
        loop.run_until_complete(store.close())
        loop.close()


def _settings(examples: int, steps: int) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )


def test_sqlite_lives_as_the_model_says() -> None:
    run_state_machine_as_test(lambda: StoreMachine(_in_memory()), settings=_settings(100, 40))


def test_postgres_lives_as_the_model_says(postgres_url: str) -> None:
    with _shared(postgres_url) as scene:
        run_state_machine_as_test(lambda: StoreMachine(scene()), settings=_settings(30, 30))


@pytest.mark.parametrize("seconds", [0.0, LEASE])
def test_the_model_itself_refuses_a_wrong_claim(seconds: float) -> None:
    """The comparison can fail: a claim of a leased message is right only after its lease ran out."""
    model = Model(now=1_000_000)
    envelope = Envelope(
        id="m",
        message_type="t",
        queue="q",
        idempotency_key="k",
        correlation_id="m",
        causation_id="m",
        subject="s",
        payload_inline=b"1",
    )
    model.put(envelope, PutOptions())
    model.claim([Lease(envelope, 2, 1, 0, 0, model.now, "a")], 1, LEASE)
    model.now += round(seconds * MICROSECONDS)
    second = [Lease(envelope, 3, 1, 0, 0, model.now, "b")]
    if seconds < LEASE:
        with pytest.raises(AssertionError):
            model.claim(second, 1, LEASE)
    else:
        model.claim(second, 1, LEASE)
        assert model.messages["m"].holder == 3
