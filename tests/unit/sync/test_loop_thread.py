"""The event loop of programs without one: signals may interrupt a caller at any moment, and nothing stays open."""

from __future__ import annotations

import asyncio
import errno
import signal
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import NoReturn

import pytest

from onefold import StoreUnavailableError
from onefold.sync.loop_thread import LoopThread

SECONDS_MAX = 20.0


class StruckError(Exception):
    """Raised by a signal handler, as KeyboardInterrupt is."""


class Striker:
    """Sends a signal to the main thread from another one, and returns when it was handled."""

    def __init__(self) -> None:
        self._taken = threading.Event()

    def take(self, *_: object) -> NoReturn:
        self._taken.set()
        raise StruckError

    def strike(self) -> None:
        self._taken.clear()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        assert self._taken.wait(SECONDS_MAX)


@pytest.fixture
def striker() -> Iterator[Striker]:
    made = Striker()
    before = signal.signal(signal.SIGUSR1, made.take)
    yield made
    signal.signal(signal.SIGUSR1, before)


@pytest.fixture
def portal() -> Iterator[LoopThread]:
    made = LoopThread()
    yield made
    made.close()


class Held:
    """A resource that is open for the length of a block; sends a signal when it is entered or left."""

    def __init__(self, striker: Striker, when: str) -> None:
        self._striker = striker
        self._when = when
        self.told: list[str] = []
        self.over = threading.Event()

    async def __aenter__(self) -> Held:
        self.told.append("entering")
        if self._when.startswith("entering"):
            self._striker.strike()
        if self._when == "entering, which takes for ever":
            try:
                await asyncio.Event().wait()
            finally:
                self.told.append("cancelled")
                self.over.set()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._when == "leaving":
            self._striker.strike()
        self.told.append("left" if kind is None else "taken back")
        self.over.set()


@pytest.mark.parametrize(
    ("when", "told"),
    [
        ("entering, which takes for ever", ["entering", "cancelled"]),
        ("entering", ["entering", "taken back"]),
        ("leaving", ["entering", "left"]),
    ],
)
def test_a_signal_leaves_nothing_open(portal: LoopThread, striker: Striker, when: str, told: list[str]) -> None:
    """An interrupted ``with app.transaction()`` must give back its connection, on SQLite the only one that writes."""
    held = Held(striker, when)
    with pytest.raises(StruckError), portal.entered(held):
        pass
    assert held.over.wait(SECONDS_MAX)
    assert held.told == told


def test_a_signal_while_it_is_left_is_raised_after_its_end(portal: LoopThread, striker: Striker) -> None:
    """When the caller continues, it is decided whether the commit succeeded."""
    held = Held(striker, "leaving")
    with pytest.raises(StruckError), portal.entered(held):
        pass
    assert held.over.is_set()


def test_a_loop_that_cannot_start_is_an_error_for_the_caller(
    portal: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without descriptors neither the first call nor a later one may hang."""

    async def answer() -> int:
        return 42

    def refuse() -> NoReturn:
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(asyncio, "new_event_loop", refuse)
        patched.setattr(asyncio.events, "new_event_loop", refuse)
        with pytest.raises(StoreUnavailableError, match="too many open files"):
            portal.run(answer())
    assert portal.run(answer()) == 42


def test_a_thread_that_cannot_start_is_an_error_for_the_caller(
    portal: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer() -> int:
        return 42

    def refuse(*_: object) -> NoReturn:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(StoreUnavailableError, match="can't start new thread"):
            portal.run(answer())
    assert portal.run(answer()) == 42


def test_a_close_does_not_wait_for_what_ignores_its_cancellation(
    portal: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It continues in its thread, which ends with the program."""
    monkeypatch.setattr("onefold.limits.HARD_TIMEOUT_GRACE", 0.1)
    release = threading.Event()

    async def stubborn() -> None:
        release.wait(SECONDS_MAX)

    portal.start(stubborn())
    portal.close()
    assert not portal.running
    release.set()
