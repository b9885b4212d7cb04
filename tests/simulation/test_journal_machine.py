"""Random lives of messages that are parked and signalled, compared step by step with the model."""

from __future__ import annotations

import asyncio

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test
from test_state_machine import Scene, StoreMachine

from onefold.errors import SignalError
from onefold.store import Failure, Parked
from onefold.store.journal_lines import Line, LineKind
from onefold.store.open import open_store
from onefold.store.sqlite import SQLiteStore
from onefold.testing import FakeClock

_FAILURE = Failure(reason="uncertain", error_type="UncertainError", error_message="it is unknown")
_picks = st.integers(min_value=0, max_value=3)
_signals = st.sampled_from(["1", "2", "3"])


class JournalMachine(StoreMachine):
    """The state machine of the other tests, with parked messages."""

    @rule(
        pick=_picks,
        delay=st.sampled_from([None, 0.0, 5.0, 45.0]),
        awaits=st.sampled_from([0, 1, 2]),
        failed=st.booleans(),
        late=st.booleans(),
    )
    def park(self, pick: int, delay: float | None, awaits: int, failed: bool, late: bool) -> None:
        """``late`` records a signal between the claim and the parking, which a naive park overlooks."""
        for lease in self._some_leases([pick]):
            if late:
                self._tell(lease.id, "late")
            outcome = Parked(delay, lease.wake, awaits, _FAILURE if failed else None)
            self._settle([(lease, outcome)], False)

    @rule(pick=_picks, signal=_signals)
    def tell(self, pick: int, signal: str) -> None:
        self._tell(self.some_id(pick), signal)

    @rule(signals=st.lists(_signals, max_size=3), awaits=st.sampled_from([1, 2, 3]))
    def wait_for(self, signals: list[str], awaits: int) -> None:
        """A whole wait at once: sent, claimed, parked, signalled, claimed again."""
        self.put(None, b"[1]", None, 0, False, False)
        id_ = self.ids[-1]
        self.claim(100, 0.0)
        for lease in [lease for lease in self.leases if lease.id == id_][-1:]:
            self._settle([(lease, Parked(None, lease.wake, awaits))], False)
        for signal in signals:
            self._tell(id_, signal)
        self.claim(100, 0.0)

    def _tell(self, id_: str, signal: str) -> None:
        step = Line(f"go/{signal}", LineKind.SIGNAL, b"1")
        try:
            recorded = self.scene.run(self.store.record(id_, [step]))
        except SignalError:
            assert id_ not in self.model.messages
            return
        assert id_ in self.model.messages
        assert bool(recorded) is self.model.tell(id_, signal)
        if recorded:
            told = {one.name for one in self.scene.run(self.store.steps(id_))}
            assert told == {f"go/{one}" for one in self.model.messages[id_].told}


def _in_memory() -> Scene:
    loop, clock = asyncio.new_event_loop(), FakeClock()
    store = SQLiteStore(":memory:", clock=clock, inline=True)
    loop.run_until_complete(store.open())
    return Scene(store, clock, loop, close=True)


def test_parked_messages_on_sqlite_live_as_the_model_says() -> None:
    """C16: parked is a state of its own, and no wake-up is lost on any path through it."""
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        lambda: JournalMachine(_in_memory()),
        settings=settings(
            max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


def test_parked_messages_on_postgresql_live_as_the_model_says(postgres_url: str) -> None:
    loop, clock = asyncio.new_event_loop(), FakeClock()
    store = open_store(postgres_url, clock=clock)
    loop.run_until_complete(store.migrate())
    loop.run_until_complete(store.open())
    try:
        run_state_machine_as_test(  # type: ignore[no-untyped-call]
            lambda: JournalMachine(Scene(store, clock, loop, close=False)),
            settings=settings(
                max_examples=15, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
            ),
        )
    finally:
        loop.run_until_complete(store.close())
        loop.close()
