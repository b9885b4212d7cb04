"""Work until all messages are handled, in as little real time as the handlers need."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

from onefold import limits
from onefold.app import App
from onefold.clock import MICROSECONDS, Clock
from onefold.store import Query, Record, State
from onefold.testing.clock import FakeClock
from onefold.worker.settings import WorkerSettings

#: More rounds than a sensible test needs; without a limit a message that snoozes for ever would never let it end.
ROUNDS_MAX = 200
#: How many living messages a failure names.
_NAMED_MAX = 5


async def drain(app: App, *, advance: bool = True, rounds: int = ROUNDS_MAX) -> int:
    """Handle every message and return how many were settled; the app must be open.

    On an app with a ``FakeClock`` time then advances to the next due message, and so on until no message is alive:
    retries, delays and leases of dead workers cost no real time.  Messages parked until a signal, a child's end or an
    operator wakes them are left as they are.
    With ``advance=False``, or on a real clock, it returns as soon as nothing is due.
    Raises ``AssertionError``, naming messages, when some are still alive after ``rounds`` rounds.
    """
    clock = app.clock
    settled = 0
    fruitless = 0
    for _ in range(rounds):
        queues = {task.queue for task in app.tasks.values()} | (await app.count()).keys()
        with _hurrying(clock, advance=advance):
            before, settled = settled, settled + await app.work_as(_settings(queues))
        fruitless = 0 if settled > before else fruitless + 1
        if not advance or not isinstance(clock, FakeClock):
            return settled
        alive = await _alive(app)
        if not alive:
            return settled
        waits = [_seconds_until(record, clock.now()) for record in alive]
        if fruitless and min(waits) == 0:
            # They are due but held at a gate, by a rate or by an earlier message of their line that is not due yet.
            later = min((wait for wait in waits if wait > 0), default=limits.DAY)
            clock.advance(min(later, limits.POLL_SECONDS * 2 ** min(fruitless, 16)))
        else:
            clock.advance(min(waits))
    raise AssertionError(f"after {rounds} rounds of work there is {await _described(app)}")


def _settings(queues: Iterable[str]) -> WorkerSettings:
    """Work like ``app.work(until_idle=True)``, but without purging, so that a test can check its messages."""
    return WorkerSettings("drain", sorted(queues), until_idle=True, alone=False)


def _hurrying(clock: Clock, *, advance: bool) -> AbstractContextManager[None]:
    """End short sleeps at once while the worker runs; a step retried in place would otherwise sleep for ever."""
    if isinstance(clock, FakeClock):
        return clock.hurry(limits.RETRY_IN_PLACE_SECONDS, advance=advance)
    return nullcontext()


async def assert_idle(app: App) -> None:
    """Raise ``AssertionError``, naming messages, unless every message has ended; the app must be open."""
    if await _alive(app):
        raise AssertionError(f"not idle: there is {await _described(app)}")


async def _alive(app: App) -> list[Record]:
    found: list[Record] = []
    after = ""
    while True:
        page = await app.find(Query(states=(State.SCHEDULED, State.LEASED, State.PARKED), after=after))
        found += [record for record in page if record.envelope.due_at < limits.INSTANT_MAX]
        if len(page) < limits.PAGE:
            return found
        after = page[-1].envelope.id


def _seconds_until(record: Record, now: int) -> float:
    """Return the time until the message can be claimed; the end of a lease is not shown, so assume a whole lease."""
    if record.state is State.LEASED:
        return limits.LEASE
    return max(0.0, (record.envelope.due_at - now) / MICROSECONDS)


async def _described(app: App) -> str:
    alive = await _alive(app)
    known = app.tasks
    lines = [
        f"{one.envelope.message_type} {one.envelope.id}: {one.state.name.lower()}, attempt {one.attempt}"
        + ("" if one.envelope.message_type in known else ", and this app has no such task")
        for one in alive[:_NAMED_MAX]
    ]
    more = f"\n  and {len(alive) - _NAMED_MAX} more" if len(alive) > _NAMED_MAX else ""
    return f"{len(alive)} alive:\n  " + "\n  ".join(lines) + more
