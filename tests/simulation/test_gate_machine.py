"""Random lives of messages at gates, compared step by step with the rules in plain Python."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from test_state_machine import Scene

from onefold.clock import MICROSECONDS
from onefold.message.envelope import UNKEYED, Envelope
from onefold.store import Act, Again, Dead, Done, Failure, HandBack, Lease, Outcome, State
from onefold.store.gates import Gating, name_of
from onefold.store.open import open_store
from onefold.store.sqlite import SQLiteStore
from onefold.testing import FakeClock

LEASE = 30.0
_FAILURE = Failure(reason="failed", error_type="ValueError", error_message="no")
_ACT = Act(actor="ada", reason="a test")
_numbers = itertools.count()
_outcomes = st.sampled_from(
    [Done(b"1"), Done(b"1"), Again(5.0, _FAILURE), Again(5.0, None, counted=False), Dead(_FAILURE), HandBack()]
)
_picks = st.integers(min_value=0, max_value=7)


@dataclass
class Message:
    """One message that has not ended, or is a dead letter."""

    gate: str | None
    ordered: bool
    place: int
    due_at: int
    attempt: int = 0
    lease_until: int = 0
    lease: Lease | None = None
    dead: bool = False


class GateMachine(RuleBasedStateMachine):
    """Plain messages, a gate with two caps, and lines that hold or skip, in a queue and with names of their own."""

    def __init__(self, scene: Scene) -> None:
        super().__init__()
        self.scene, self.store, self.clock = scene, scene.store, scene.clock
        self.number = next(_numbers)
        self.name = f"gates-{self.number}"
        self.places = itertools.count()
        self.messages: dict[str, Message] = {}
        self.gatings = {
            one.name: one
            for one in (
                Gating(name=f"cap-{self.number}", max_running=3, max_running_each=2),
                Gating(name=f"hold-{self.number}", max_running=2),
                Gating(name=f"skip-{self.number}", on_failure="skip"),
            )
        }

    def teardown(self) -> None:
        if self.scene.close:
            self.scene.run(self.store.close())
            self.scene.loop.close()

    # the rules

    def runs(self, message: Message) -> bool:
        return message.lease is not None and message.lease_until > self.clock.now()

    def may_run(self, message: Message) -> bool:
        """Whether a claim may return it now."""
        now = self.clock.now()
        if message.dead or self.runs(message) or message.due_at > now:
            return False
        if message.gate is None:
            return True
        gating = self.gatings[name_of(message.gate)]
        inside = [one.gate for one in self.messages.values() if one.gate is not None and self.runs(one)]
        of_name = sum(name_of(gate) == gating.name for gate in inside)
        if gating.max_running is not None and of_name >= gating.max_running:
            return False
        if gating.max_running_each is not None and inside.count(message.gate) >= gating.max_running_each:
            return False
        return not message.ordered or (message.gate not in inside and self.head(message.gate, gating) is message)

    def head(self, gate: str, gating: Gating) -> Message | None:
        line = sorted((one for one in self.messages.values() if one.gate == gate and not one.dead), key=_place)
        if gating.on_failure == "skip":
            line = [one for one in line if not (one.attempt and one.due_at > self.clock.now())]
        return line[0] if line else None

    # the verbs

    @rule(kind=st.sampled_from(["", "cap", "cap", "hold", "skip"]), key=st.sampled_from("ab"), later=st.booleans())
    def put(self, kind: str, key: str, later: bool) -> None:
        place, delay = next(self.places), 5 * MICROSECONDS * later
        id_ = f"{self.number:08x}-0000-7000-8000-{place:012x}"
        gate, ordered = f"{kind}-{self.number}:{key}" if kind else None, kind in ("hold", "skip")
        sent = Envelope(
            id=id_,
            message_type=self.name,
            queue=self.name,
            idempotency_key=f"{UNKEYED}{id_}",
            correlation_id=self.name,
            causation_id=id_,
            subject="subject",
            payload_inline=b"[]",
            delay=delay,
            gate=gate,
            ordering_key=key if ordered else None,
        )
        self.scene.run(self.store.put([sent]))
        self.messages[id_] = Message(gate, ordered, place, self.clock.now() + delay)

    @rule(limit=st.sampled_from([1, 2, 100]))
    def claim(self, limit: int) -> None:
        leases = self.scene.run(
            self.store.claim([self.name], types=[self.name], limit=limit, lease=LEASE, worker="w", gatings=self.gatings)
        )
        for lease in leases:
            message = self.messages[lease.id]
            assert self.may_run(message), "it was claimed and must not be"
            assert lease.gate == message.gate
            message.lease, message.lease_until = lease, self.clock.now() + round(LEASE * MICROSECONDS)
        assert len(leases) == limit or not [id_ for id_, one in self.messages.items() if self.may_run(one)]

    @rule(pick=_picks, outcome=_outcomes)
    def settle(self, pick: int, outcome: Outcome) -> None:
        held = [(id_, one) for id_, one in self.messages.items() if one.lease is not None and not one.dead]
        if not held:
            return
        id_, message = held[pick % len(held)]
        assert message.lease is not None
        (won,) = self.scene.run(self.store.settle([(message.lease, outcome)]))
        if not won:  # its lease has run out, but no answer has shown that yet
            assert not self.runs(message)
            return
        message.lease = None
        if isinstance(outcome, Done):
            del self.messages[id_]
        elif isinstance(outcome, Dead):
            message.dead = True
        elif isinstance(outcome, Again):
            message.attempt += outcome.counted
            message.due_at = self.clock.now() + round(outcome.delay * MICROSECONDS)

    @rule(seconds=st.sampled_from([1.0, 6.0, LEASE + 1]))
    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(pick=_picks)
    def cancel(self, pick: int) -> None:
        alive = [id_ for id_, one in self.messages.items() if not one.dead]
        if alive:
            self._move(alive[pick % len(alive)], State.CANCELLED)
            del self.messages[alive[pick % len(alive)]]

    @rule(pick=_picks)
    def redrive(self, pick: int) -> None:
        dead = [id_ for id_, one in self.messages.items() if one.dead]
        if dead:
            id_ = dead[pick % len(dead)]
            self._move(id_, State.SCHEDULED)
            was = self.messages.pop(id_)
            self.messages[id_] = Message(was.gate, was.ordered, next(self.places), self.clock.now())

    def _move(self, id_: str, to: State) -> None:
        async def move() -> None:
            async with self.store.transaction() as transaction:
                assert await transaction.move([id_], to, _ACT) == [id_]

        self.scene.run(move())


def _place(message: Message) -> int:
    return message.place


def _settings(examples: int, steps: int) -> settings:
    return settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=list(HealthCheck)
    )


def test_gates_on_sqlite_let_through_exactly_the_allowed_messages() -> None:
    """F2, F4: no message too many, none forgotten."""

    def machine() -> GateMachine:
        loop, clock = asyncio.new_event_loop(), FakeClock()
        store = SQLiteStore(":memory:", clock=clock, inline=True)
        loop.run_until_complete(store.open())
        return GateMachine(Scene(store, clock, loop, close=True))

    run_state_machine_as_test(machine, settings=_settings(60, 40))  # type: ignore[no-untyped-call]


def test_gates_on_postgresql_let_through_exactly_the_allowed_messages(postgres_url: str) -> None:
    loop, clock = asyncio.new_event_loop(), FakeClock()
    store = open_store(postgres_url, clock=clock)
    loop.run_until_complete(store.migrate())
    loop.run_until_complete(store.open())
    try:
        run_state_machine_as_test(  # type: ignore[no-untyped-call]
            lambda: GateMachine(Scene(store, clock, loop, close=False)), settings=_settings(15, 30)
        )
    finally:
        loop.run_until_complete(store.close())
        loop.close()
