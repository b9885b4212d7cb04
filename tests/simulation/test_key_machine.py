"""Random sends with every mixture of keys, one by one and at once, compared with a model in plain Python.

Senders at once share commits within one store and take turns with those of another store on the same database.
Their answers must be those of the model for *some* order of the senders; the stored messages and runs must be the same.
SQLite has one writer, so there it is an order of whole puts.  On PostgreSQL a put is stored as a whole too, but its
messages are judged one after the other, and a missing key cannot be locked: those of other senders may come between.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from onefold import limits
from onefold.clock import MICROSECONDS, give_way
from onefold.errors import KeyReuseError, StoreConflictError
from onefold.message.codec import fingerprint_of
from onefold.message.envelope import UNKEYED, Envelope
from onefold.store import KEEP, Act, Dead, Done, Failure, PutOptions, Query, State, Store, Stored
from onefold.store.open import open_store
from onefold.testing import FakeClock
from onefold.testing.model import Model

Answer = TypeVar("Answer")

_WINDOW = 60.0
_ACT = Act(actor="ada", reason="a test")
_DEAD = Dead(Failure(reason="failed", error_type="ValueError", error_message="no"))
#: SQLite with each of its drivers; the file need not survive a loss of power.
SQLITE_OPTIONS = ["?synchronous=OFF", "?synchronous=OFF&driver=sqlite3"]

Told = tuple[str, bool, bool]
_Way = Literal["put", "transaction", "batch", "redrive"]


@dataclass(frozen=True)
class Sent:
    """The keys and the payload of one message."""

    key: str | None
    window: str | None
    payload: bytes


@dataclass(frozen=True)
class Sender:
    """One call that sends some messages, in one of the two stores."""

    store: int
    way: _Way
    batch: str
    sent: tuple[Sent, ...]


_sent = st.builds(
    Sent,
    key=st.sampled_from([None, "a", "a", "b", "c"]),
    window=st.sampled_from([None, None, "d", "e"]),
    payload=st.sampled_from([b"[1]", b"[1]", b"[2]"]),
)
_senders = st.builds(
    Sender,
    store=st.sampled_from([0, 1]),
    way=st.sampled_from(["put", "put", "transaction", "batch", "redrive"]),
    batch=st.sampled_from(["x", "y"]),
    sent=st.lists(_sent, min_size=1, max_size=4).map(tuple),
)
_single = _sent.map(lambda one: Sender(0, "put", "", (one,)))


@dataclass
class KeyModel:
    """The model of the messages of one type, and of their batches."""

    model: Model
    batches: dict[str, tuple[list[tuple[str, str, bytes]], str, int]] = field(default_factory=dict)

    def fork(self) -> KeyModel:
        """Return a copy to try something with."""
        messages = {id_: replace(message) for id_, message in self.model.messages.items()}
        return KeyModel(Model(self.model.now, messages, dict(self.model.keys)), dict(self.batches))

    def put(self, sender: Sender, envelope: Envelope) -> Stored:
        """Apply one message, and return the answer for its sender."""
        return self.model.put(envelope, PutOptions(if_dead="redrive") if sender.way == "redrive" else KEEP)

    def send(self, sender: Sender, envelopes: Sequence[Envelope]) -> tuple[KeyModel, list[Told] | None]:
        """Return the model after the messages, one after the other, and the answers; None if the send is refused."""
        after = self.fork()
        answers = [after.put(sender, one) for one in envelopes]
        told = [(one.id, one.duplicate, one.clash) for one in answers]
        known = [one for one in answers if one.duplicate or one.clash]
        if any(one.clash for one in answers) and sender.way in ("transaction", "batch"):
            return self, None
        if sender.way == "batch":
            content = [(one.message_type, one.idempotency_key, one.fingerprint) for one in envelopes]
            held, first, until = self.batches.get(sender.batch, (content, "", 0))
            is_held = until > self.model.now and first in self.model.messages
            if (is_held and held != content) or (known and len(known) < len(answers)):
                return self, None
            if not known:
                expires_at = self.model.now + round(limits.KEY_WINDOW * MICROSECONDS)
                after.batches[sender.batch] = (content, envelopes[0].id, expires_at)
        return after, told


@dataclass
class Scene:
    """Two stores on one database, their clock, and their event loop."""

    stores: tuple[Store, Store]
    clock: FakeClock
    loop: asyncio.AbstractEventLoop

    def run(self, call: Coroutine[Any, Any, Answer]) -> Answer:
        return self.loop.run_until_complete(call)


#: One step of the model: returns the model after it, or None if the sender's real answer was another.
Unit = Callable[[KeyModel], KeyModel | None]


def _put_whole(
    sender: Sender, envelopes: Sequence[Envelope], told: list[Told] | None, before: KeyModel
) -> KeyModel | None:
    after, expected = before.send(sender, envelopes)
    return after if expected == told else None


def _put_single(sender: Sender, envelope: Envelope, told: Told, before: KeyModel) -> KeyModel | None:
    after = before.fork()
    stored = after.put(sender, envelope)
    return after if (stored.id, stored.duplicate, stored.clash) == told else None


def _explain(before: KeyModel, left: list[list[Unit]], tried: set[Any]) -> KeyModel | None:
    """Return the model after some order of the senders in which all answers are right, or None if there is none."""
    if not any(left):
        return before
    holders = tuple(sorted((name, key.message_id) for name, key in before.model.keys.items()))
    if (seen := (tuple(map(len, left)), holders)) in tried:
        return None
    tried.add(seen)
    for place, units in enumerate(left):
        if units and (after := units[0](before)) is not None:
            found = _explain(after, [*left[:place], units[1:], *left[place + 1 :]], tried)
            if found is not None:
                return found
    return None


_numbers = itertools.count()


class KeyMachine(RuleBasedStateMachine):
    """Messages of their own queue and type, so that many machines may share one database."""

    def __init__(self, scene: Scene) -> None:
        super().__init__()
        self.scene = scene
        self.number = next(_numbers)
        self.name = f"keys-{self.number}"
        self.state = KeyModel(Model(now=scene.clock.now()))
        self.count = itertools.count()
        #: Whether the model has differed from the store, so that nothing more can be compared.
        self.differs = False
        #: How often each message was handled.
        self.runs: Counter[str] = Counter()

    def envelope(self, sender: Sender, place: int, sent: Sent) -> Envelope:
        id_ = f"{self.number:08x}-0000-7000-8000-{next(self.count):012x}"
        # As the app does: in a batch, a message without a key is named after the batch and its place.
        unkeyed = f"{sender.batch}#{place}" if sender.way == "batch" else f"{UNKEYED}{id_}"
        return Envelope(
            id=id_,
            message_type=self.name,
            queue=self.name,
            idempotency_key=sent.key or unkeyed,
            correlation_id=self.name,
            causation_id=id_,
            subject="subject",
            payload_inline=sent.payload,
            fingerprint=fingerprint_of(sent.payload),
            deduplication_key=sent.window,
            deduplicate_for=round(_WINDOW * MICROSECONDS),
        )

    async def _send(self, sender: Sender, envelopes: Sequence[Envelope]) -> list[Told] | None:
        """Send as the app does; return None if the send was refused, so that none of it may be stored.

        Transactions of callers that take the same keys in different orders may deadlock.  The server ends one of them,
        and nothing of it may be stored either: then no message has an answer.
        """
        store = self.scene.stores[sender.store]
        try:
            if sender.way == "transaction":
                stored = await self._send_inside(store, envelopes)
            else:
                stored = await store.put(envelopes, self._options(sender))
        except KeyReuseError:
            return None
        except StoreConflictError:
            if sender.way != "transaction":
                raise
            return []
        return [(one.id, one.duplicate, one.clash) for one in stored]

    def _options(self, sender: Sender) -> PutOptions:
        if sender.way == "batch":
            return PutOptions(batch_key=f"{self.name}/{sender.batch}")
        return PutOptions(if_dead="redrive") if sender.way == "redrive" else KEEP

    async def _send_inside(self, store: Store, envelopes: Sequence[Envelope]) -> list[Stored]:
        async with store.transaction() as transaction:
            stored = await transaction.put(envelopes)
            for one in stored:
                if one.clash:
                    raise KeyReuseError(self.name, "", one.id)
            # Other senders may be quicker before the commit.
            await give_way()
        return stored

    # sending

    @rule(sender=_senders)
    def send(self, sender: Sender) -> None:
        self.send_at_once([sender])

    @rule(senders=st.lists(_single, min_size=2, max_size=4))
    def send_singles_at_once(self, senders: list[Sender]) -> None:
        """They reach one store in one iteration of the loop, and share a commit."""
        self.send_at_once(senders)

    @rule(senders=st.lists(st.one_of(_single, _senders), min_size=2, max_size=4))
    def send_at_once(self, senders: list[Sender]) -> None:
        made = [[self.envelope(one, place, sent) for place, sent in enumerate(one.sent)] for one in senders]

        async def together() -> list[list[Told] | None]:
            return await asyncio.gather(*(self._send(*both) for both in zip(senders, made, strict=True)))

        told = self.scene.run(together())
        units = [self._units(*each) for each in zip(senders, made, told, strict=True)]
        if (after := _explain(self.state, units, set())) is None:
            self.differs = True
            raise AssertionError(f"in no order are {senders} told {told}")
        self.state = after

    def _units(self, sender: Sender, envelopes: Sequence[Envelope], told: list[Told] | None) -> list[Unit]:
        """Return the parts of a send that each happen at once, in order; none if it ended in a deadlock."""
        if told == []:
            return []
        if told is None or sender.way == "batch" or not self.scene.stores[0].capabilities.shared:
            return [partial(_put_whole, sender, envelopes, told)]
        return [partial(_put_single, sender, e, one) for e, one in zip(envelopes, told, strict=True)]

    # the life of messages

    @rule(seconds=st.sampled_from([_WINDOW - 0.000001, _WINDOW, limits.KEY_WINDOW]))
    def time_passes(self, seconds: float) -> None:
        self.scene.clock.advance(seconds)

    @rule(dies=st.booleans())
    def work(self, dies: bool) -> None:
        """Handle the waiting messages: each stored message runs once."""
        self.state.model.now = self.scene.clock.now()
        leases = self.scene.run(
            self.scene.stores[0].claim([self.name], types=[self.name], limit=100, lease=30.0, worker="grace")
        )
        self.state.model.claim(leases, 100, 30.0)
        self.runs.update(lease.id for lease in leases)
        settlements = [(lease, _DEAD if dies else Done(b"1")) for lease in leases]
        assert all(self.scene.run(self.scene.stores[1].settle(settlements)))
        for lease, outcome in settlements:
            self.state.model.settle(lease, outcome)

    @rule(pick=st.integers(min_value=0, max_value=3))
    def cancel(self, pick: int) -> None:
        """A message that never ran frees its keys."""
        self.state.model.now = self.scene.clock.now()
        alive = [id_ for id_, message in self.state.model.messages.items() if not message.state.ended]
        if pick < len(alive):
            assert self.scene.run(self._cancel(alive[pick])) is self.state.model.cancel(alive[pick])

    async def _cancel(self, id_: str) -> bool:
        async with self.scene.stores[1].transaction() as transaction:
            return await transaction.move([id_], State.CANCELLED, _ACT) == [id_]

    # Invariants.

    @invariant()
    def store_and_model_agree(self) -> None:
        """The stored messages are those of the model, and no two living messages hold one key."""
        model = self.state.model
        model.now = self.scene.clock.now()
        found = self.scene.run(self.scene.stores[0].find(Query(queue=self.name, limit=1_000)))
        assert {(one.envelope.id, one.state) for one in found} == {(id_, m.state) for id_, m in model.messages.items()}
        alive = Counter(one.envelope.idempotency_key for one in found if one.envelope.keyed and not one.state.ended)
        assert all(times == 1 for times in alive.values()), "two messages with one key are alive"

    def teardown(self) -> None:
        if self.differs:
            return
        self.work(dies=False)
        self.store_and_model_agree()
        for id_, message in self.state.model.messages.items():
            ran = message.replay_count + (message.state is not State.CANCELLED)
            assert self.runs[id_] == ran, f"{id_} ran {self.runs[id_]} times"


@contextmanager
def opened(url: str) -> Iterator[Callable[[], Scene]]:
    """Two stores for all examples, because opening one takes longer than an example."""
    loop, clock = asyncio.new_event_loop(), FakeClock()
    first, second = open_store(url, clock=clock), open_store(url, clock=clock)
    loop.run_until_complete(first.migrate())
    for store in (first, second):
        loop.run_until_complete(store.open())
    try:
        yield lambda: Scene((first, second), clock, loop)
    finally:
        for store in (second, first):
            loop.run_until_complete(store.close())
        loop.close()


def check_keys(url: str, examples: int, steps: int, *, fixed: bool = False) -> None:
    """Try random stories; with ``fixed`` always the same ones, without shrinking a failure."""
    chosen = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
        derandomize=fixed,
        database=None,
        phases=[Phase.generate] if fixed else [Phase.generate, Phase.shrink],
    )
    with opened(url) as scene:
        run_state_machine_as_test(lambda: KeyMachine(scene()), settings=chosen)


@pytest.mark.parametrize("options", SQLITE_OPTIONS)
def test_sqlite_keeps_one_message_of_a_key(sqlite_url: str, options: str) -> None:
    check_keys(f"{sqlite_url}{options}", 60, 12)


def test_postgres_keeps_one_message_of_a_key(postgres_url: str) -> None:
    check_keys(postgres_url, 25, 10)


@pytest.mark.deep
@pytest.mark.parametrize("options", SQLITE_OPTIONS)
def test_sqlite_keeps_one_message_of_a_key_for_long(sqlite_url: str, options: str) -> None:
    check_keys(f"{sqlite_url}{options}", 2_000, 30)


@pytest.mark.deep
def test_postgres_keeps_one_message_of_a_key_for_long(postgres_url: str) -> None:
    check_keys(postgres_url, 1_000, 30)
