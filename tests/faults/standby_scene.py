"""All operations of a store while their commits wait for a synchronous standby that does not exist."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, LiteralString

import psycopg
import pytest

from onefold import CommitUnknownError, StoreUnavailableError
from onefold.clock import SystemClock, new_id, system_random
from onefold.message.codec import fingerprint_of
from onefold.message.envelope import UNKEYED, Envelope
from onefold.store import Done, Lease
from onefold.store.journal_lines import Line, LineKind
from onefold.store.postgres import PostgresStore
from onefold.store.postgres.wire import connect as connection
from onefold.testing.servers import PostgresServer

#: The real values are thirty times as long.
PATIENCE, ANSWER_SECONDS = 0.3, 0.3
#: All operations give up within this time, although each may retry.
GIVE_UP_SECONDS_MAX = 30.0

#: Commits to wait until the server has read its settings.
PROBES_MAX = 1_000

WAYS = ("cancel", "terminate", "fast", "immediate")
_END: Mapping[str, LiteralString] = {
    "cancel": "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'",
    "terminate": "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'",
}
#: Whether an answered operation is on a server: looked up by the message's id, and its fence if it has one.
_PRESENT: Mapping[str, LiteralString] = {
    "put": "SELECT count(*) FROM onefold.message WHERE id = %s::uuid AND %s >= 0",
    "claim": "SELECT count(*) FROM onefold.inbox WHERE id = %s::uuid AND fence >= %s",
    "settle": "SELECT count(*) FROM onefold.outcome WHERE id = %s::uuid AND fence = %s",
    "record": "SELECT count(*) FROM onefold.step WHERE message_id = %s::uuid AND %s >= 0",
}
#: An operation that was answered as done: its name, the message and the fence.
Answered = tuple[str, str, int]

_clock = SystemClock()
_chance = system_random()


def message(key: str | None = None, *, queue: str = "sent") -> Envelope:
    id_ = new_id(_clock.now(), _chance)
    return Envelope(
        id=id_,
        message_type="charge",
        queue=queue,
        idempotency_key=key or f"{UNKEYED}{id_}",
        correlation_id=id_,
        causation_id=id_,
        subject="order:1",
        payload_inline=b"{}",
        fingerprint=fingerprint_of(b"{}"),
    )


@contextmanager
def short_waits() -> Iterator[None]:
    """Shorten the time to wait for an answer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connection, "ANSWER_SECONDS", ANSWER_SECONDS)
        patch.setitem(connection._ANSWERS, "handlers", ANSWER_SECONDS)  # type: ignore[call-overload]
        yield


class Waiters:
    """Operations of every kind on one store, and those that were answered as done."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.store = PostgresStore(url, patience=PATIENCE)
        self.answered: list[Answered] = []
        self.given_up = 0
        self._leases: list[Lease] = []

    async def prepare(self) -> None:
        """With the standby: store messages to claim, and claim leases to settle and to record for."""
        await self.store.migrate()
        await self.store.open()
        await self.store.put([message(queue="held") for _ in range(4 * len(WAYS))])
        await self.store.put([message(queue="waiting") for _ in range(len(WAYS))])
        self._leases = await self.claim("held", 4 * len(WAYS))
        accepted = message("before")
        await self.store.put([accepted])
        self.answered.append(("put", accepted.id, 0))

    async def claim(self, queue: str, limit: int) -> list[Lease]:
        return await self.store.claim([queue], types=["charge"], limit=limit, lease=600, worker="w")

    def operations(self, way: str) -> list[Coroutine[Any, Any, None]]:
        """Return one operation of each kind; none may be answered as done while nothing is replicated."""
        settled, concluded, recorded, both = (self._leases.pop() for _ in range(4))
        many = [message(f"{way}-{number}") for number in range(20)]
        return [
            self._put([message(f"{way}-keyed")]),
            self._put([message()]),
            self._put(many),
            self._put_in_a_transaction(message(f"{way}-outbox")),
            self._settle(settled),
            self._conclude(concluded),
            self._record(recorded),
            self._record_in_a_transaction(both),
            self._claim_one(),
        ]

    async def _put(self, envelopes: list[Envelope]) -> None:
        stored = await self.store.put(envelopes)
        self.answered += [("put", one.id, 0) for one in stored]

    async def _put_in_a_transaction(self, envelope: Envelope) -> None:
        async with self.store.transaction() as transaction:
            await transaction.put([envelope])
        self.answered.append(("put", envelope.id, 0))

    async def _settle(self, lease: Lease) -> None:
        if (await self.store.settle([(lease, Done(b"1"))]))[0]:
            self.answered.append(("settle", lease.id, lease.fence))

    async def _conclude(self, lease: Lease) -> None:
        async with self.store.transaction() as transaction:
            await transaction.execute("SELECT 1")
            await transaction.conclude([(lease, Done(b"1"))])
        self.answered.append(("settle", lease.id, lease.fence))

    async def _record(self, lease: Lease) -> None:
        await self.store.record(lease, [Line("a", LineKind.RESULT, b"1")])
        self.answered.append(("record", lease.id, 0))

    async def _record_in_a_transaction(self, lease: Lease) -> None:
        async with self.store.transaction() as transaction:
            await transaction.record(lease, [Line("a", LineKind.RESULT, b"1")])
        self.answered.append(("record", lease.id, 0))

    async def _claim_one(self) -> None:
        self.answered += [("claim", lease.id, lease.fence) for lease in await self.claim("waiting", 1)]

    async def end_all(self, way: str, server: PostgresServer) -> None:
        """Start every operation, and end their commits in this way until each is answered or given up."""
        tasks = [asyncio.create_task(one) for one in self.operations(way)]
        give_up_at = asyncio.get_running_loop().time() + GIVE_UP_SECONDS_MAX
        restarted = False
        while not all(task.done() for task in tasks):
            assert asyncio.get_running_loop().time() < give_up_at, "an operation neither answers nor gives up"
            if way in _END:
                await asyncio.to_thread(ask, server.url(), _END[way])
            elif not restarted and await asyncio.to_thread(_all_wait, self.url, len(tasks)):
                await asyncio.to_thread(server.shut_down, way)  # type: ignore[arg-type]
                await asyncio.to_thread(server.restart)
                restarted = True
            await asyncio.sleep(0.05)
        for task in tasks:
            error = task.exception()
            assert error is None or isinstance(error, StoreUnavailableError | CommitUnknownError), repr(error)
            self.given_up += error is not None


def _all_wait(url: str, number: int) -> bool:
    ((waiting,),) = ask(
        url, "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'SyncRep'"
    )
    return bool(waiting >= number // 2)


def ask(url: str, statement: LiteralString, *parameters: Any) -> list[tuple[Any, ...]]:
    """Query a server directly, without waiting for a standby."""
    with psycopg.connect(url, autocommit=True, options="-c synchronous_commit=local") as direct:
        cursor = direct.execute(statement, parameters or None)
        return cursor.fetchall() if cursor.description else []


def absent(url: str, answered: list[Answered]) -> list[Answered]:
    """Return the operations that were answered as done and are not on this server."""
    return [one for one in answered if not ask(url, _PRESENT[one[0]], one[1], one[2])[0][0]]


async def ended_waits_are_not_answered(way: str, server: PostgresServer, url: str) -> None:
    """Without a standby nothing is replicated, so nothing may be answered as done; once released, work continues."""
    waiters = Waiters(url)
    await waiters.prepare()
    try:
        require_standby(server)
        before = len(waiters.answered)
        await waiters.end_all(way, server)
        assert waiters.answered[before:] == [], "answered as done, though it is on no standby"
        assert waiters.given_up > 0, "nothing had to wait"
        release_standby(server)
        await waiters.store.put([again := message(f"{way}-keyed")])
        assert again.idempotency_key == f"{way}-keyed"
    finally:
        release_standby(server)
        await waiters.store.close()


def require_standby(server: PostgresServer) -> None:
    """Make every commit wait for a standby that does not exist."""
    ask(server.url(), "ALTER SYSTEM SET synchronous_standby_names = 'nowhere'")
    ask(server.url(), "SELECT pg_reload_conf()")
    # The server reads its settings some time later.
    for _ in range(PROBES_MAX):
        probe = threading.Thread(target=_commit, args=[server.url()])
        probe.start()
        while probe.is_alive():
            if ask(server.url(), _END["cancel"]):
                probe.join()
                return
    raise AssertionError("commits do not wait for a standby")


def _commit(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as probe:
        probe.execute("SELECT pg_logical_emit_message(true, 'probe', '')")


def release_standby(server: PostgresServer) -> None:
    """Let commits succeed without a standby."""
    ask(server.url(), "ALTER SYSTEM RESET synchronous_standby_names")
    ask(server.url(), "SELECT pg_reload_conf()")
