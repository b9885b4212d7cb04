"""The verbs on one PostgreSQL connection, inside one transaction or as one statement of their own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from onefold import limits
from onefold.clock import MICROSECONDS, Clock
from onefold.errors import KeyReuseError
from onefold.message.envelope import Envelope
from onefold.store import (
    Act,
    Attempt,
    Counts,
    Done,
    Fenced,
    Lease,
    Progress,
    Purged,
    PutOptions,
    Query,
    Record,
    Registered,
    Said,
    State,
    Stored,
)
from onefold.store.postgres.verbs.claim import LINE_RETENTION
from onefold.store.postgres.verbs.journal import JournalTable, is_id, lines_of
from onefold.store.postgres.verbs.put import Putter, store_fresh
from onefold.store.postgres.verbs.settle import (
    Settlement,
    brings_more,
    fenced,
    is_numbered,
    passing,
    sends_of,
    settling,
)
from onefold.store.postgres.wire.arrays import bigints, ids, numbers, texts
from onefold.store.postgres.wire.wire import Named, Speaker
from onefold.store.shared.finding import statement_for
from onefold.store.shared.journal import addressed, notes_of
from onefold.store.shared.rows import attempt_of, progress_of, record_of

#: Comes before every id.
FIRST_ID = "00000000-0000-0000-0000-000000000000"
#: Looks for messages to be locked: one that ends meanwhile is found by the second.
_LOOKS = 2

_MOVES = {State.SCHEDULED: "move_redrive", State.DISCARDED: "move_discard", State.CANCELLED: "move_cancel"}


class Session:
    """One connection and the clock that dates what is written through it; without one, the server's."""

    def __init__(self, wire: Speaker, clock: Clock | None) -> None:
        self.wire = wire
        self._clock = clock
        self._made: Putter | None = None
        #: Queues in which messages of other owners became due; they are notified after the commit.
        self.woken: set[str] = set()

    @property
    def _now(self) -> int | None:
        return None if self._clock is None else self._clock.now()

    @property
    def journals(self) -> JournalTable:
        """The verbs on journals, on this connection."""
        return JournalTable(self.wire, self._now, self.woken)

    # put

    async def put(self, envelopes: Sequence[Envelope], options: PutOptions) -> list[Stored]:
        return await self._putter.put(envelopes, options)

    @property
    def _putter(self) -> Putter:
        """The putter of the one transaction; most sessions need none."""
        if self._made is None:
            self._made = Putter(self.wire, self._clock, self._redrive)
        return self._made

    async def put_fresh(self, envelopes: Sequence[Envelope]) -> set[str]:
        """Store messages in one statement; return the ids of those whose key was taken."""
        return await store_fresh(self.wire, self._now, envelopes)

    async def put_contested(self, envelopes: Sequence[Envelope]) -> list[Stored]:
        """Store messages that could not be stored at first: a key was taken, or must be judged."""
        answers = await self._putter.contest(list({e.id: e for e in envelopes}.values()), PutOptions())
        return [answers[e.id] for e in envelopes]

    async def put_sends(self, envelopes: Sequence[Envelope]) -> dict[str, str]:
        """Put what handlers sent and return under which id each is kept; a key that clashes fails its handler."""
        answers = await self.put(envelopes, PutOptions())
        for e, stored in zip(envelopes, answers, strict=True):
            if stored.clash:
                raise KeyReuseError(e.message_type, e.idempotency_key, stored.id)
        return {e.id: stored.id for e, stored in zip(envelopes, answers, strict=True)}

    async def _redrive(self, message_id: str) -> bool:
        act = Act(actor="sender", reason="sent again with if_dead='redrive'")
        return bool(await self.move([message_id], State.SCHEDULED, act))

    # lease

    async def extend(self, leases: Sequence[Fenced], lease: float, starting: bool) -> list[bool | None]:
        """Extend leases; False for each that is lost, None for each that is held while its row is locked."""
        # An id that is not a UUID cannot be in the table.
        given = [one for one in leases if is_id(one.id)]
        parameters: dict[str, Any] = {
            **fenced(given),
            "now": self._now,
            "lease": round(lease * MICROSECONDS),
            "starting": int(starting),
        }
        answers: dict[tuple[str, int], bool | None] = {(one.id, one.fence): True for one in given}
        for id_, fence, is_held in await self.wire.rows("extend", parameters):
            answers[id_, fence] = None if is_held else False
        return [answers.get((one.id, one.fence), False) for one in leases]

    async def report(self, reports: Sequence[tuple[Fenced, Said | None]]) -> list[bool]:
        given = [(lease, said) for lease, said in reports if is_id(lease.id)]
        percents = [None if said is None or said.percent is None else float(said.percent) for _, said in given]
        parameters: dict[str, Any] = {
            **fenced([lease for lease, _ in given]),
            "now": self._now,
            "percents": numbers(percents),
            "messages": texts(["" if said is None else said.message for _, said in given]),
            "spoken": bigints([int(said is not None) for _, said in given]),
        }
        held = set(await self.wire.rows("report", parameters))
        return [(lease.id, lease.fence) in held for lease, _ in reports]

    async def progress(self, message_ids: Sequence[str]) -> dict[str, Progress]:
        given = ids([message_id for message_id in message_ids if is_id(message_id)])
        return {row[0]: progress_of(row) for row in await self.wire.rows("progress", {"ids": given})}

    # settle

    async def settle(self, settlements: Sequence[Settlement], then: Sequence[Named] = ()) -> list[bool]:
        """Settle, run ``then`` in the same round trip, and write what leaves with these settlements."""
        if len(settlements) == 1 and isinstance(settlements[0][1], Done) and not is_numbered(settlements[0]):
            one: Named = ("settle_one", self._ending_one(settlements[0][0], settlements[0][1]))
            won = [bool((await self.wire.rows_of_each([one, *then]))[0][0][0])]
        else:
            won = await self._settle_many(settlements, then)
        if brings_more(settlements):
            await self._bring_more([one for one, is_held in zip(settlements, won, strict=True) if is_held])
        return won

    async def lock_for_settling(self, settlements: Sequence[Settlement]) -> set[str]:
        """Lock the rows of these messages; return the ids of those that another transaction has locked."""
        given = {"ids": ids([lease.id for lease, _ in settlements])}
        return {id_ for (id_,) in await self.wire.rows("settle_locked", given)}

    async def _bring_more(self, held: Sequence[Settlement]) -> None:
        """Write what leaves with these settlements: messages, lines of their own journals, and lines for others."""
        sends = sends_of(held)
        kept = await self.put_sends(sends) if sends else {}
        if own := lines_of(held):
            await self.journals.write(own)
        if notes := notes_of(held):
            await self.journals.tell(addressed(notes, kept))

    def _passing(self, ending: Sequence[Settlement]) -> Named:
        """Return the statement that lets messages through that wait for these numbers."""
        return "gate_passed", {**passing(ending), "now": self._now, "line_retention": LINE_RETENTION}

    def concluding(self, lease: Lease, outcome: Done) -> list[Named]:
        """Return what settles one success as the last thing in its transaction, or fails."""
        last: list[Named] = [
            ("settle_planned", {}),
            ("settle_one", self._ending_one(lease, outcome, strictly=True)),
        ]
        return [*last, self._passing([(lease, outcome)])] if is_numbered((lease, outcome)) else last

    def _ending_one(self, lease: Lease, outcome: Done, *, strictly: bool = False) -> dict[str, Any]:
        return {
            "now": self._now,
            "id": lease.id,
            "fence": lease.fence,
            "key_window": round(outcome.key_window * MICROSECONDS),
            "body_window": round(outcome.body_retention * MICROSECONDS),
            "result": outcome.result,
            "strictly": strictly,
        }

    async def _settle_many(self, settlements: Sequence[Settlement], then: Sequence[Named]) -> list[bool]:
        """Settle in one round trip; a message that is given twice, by two of its leases, takes two."""
        won = [False] * len(settlements)
        left = list(range(len(settlements)))
        while left:
            once = {settlements[place][0].envelope.id: place for place in reversed(left)}
            those = [settlements[place] for place in sorted(once.values())]
            lost = await self._settle_once(those, then)
            for place in once.values():
                lease = settlements[place][0]
                won[place] = not lost or (lease.envelope.id, lease.fence) not in lost
            left = [] if len(once) == len(left) else sorted(set(left).difference(once.values()))
        return won

    async def _settle_once(self, settlements: Sequence[Settlement], then: Sequence[Named]) -> set[tuple[Any, ...]]:
        """Settle, each message once; return id and fence of those whose lease was stale."""
        statements: list[Named] = [(name, {**given, "now": self._now}) for name, given in settling(settlements)]
        if ending := [one for one in settlements if is_numbered(one)]:
            statements.append(self._passing(ending))
        answers = await self.wire.rows_of_each([*statements, *then])
        lost = {lost for rows in answers[: len(statements)] for lost in rows}
        if any(fence < 0 for _, fence in lost):
            self.woken |= {lease.envelope.queue for lease, _ in settlements if (lease.envelope.id, -1) in lost}
        return lost

    # operators

    async def lock(self, message_ids: Sequence[str]) -> dict[str, State]:
        """Return the states of messages, and lock their rows."""
        given = [message_id for message_id in message_ids if is_id(message_id)]
        found: dict[str, State] = {}
        # One that ended while the statement waited for its row is seen by the next statement only.
        for _ in range(_LOOKS):
            if missing := [message_id for message_id in given if message_id not in found]:
                rows = await self.wire.rows("lock", {"ids": ids(missing)})
                found |= {message_id: State(state) for message_id, state in rows}
        return found

    async def move(self, message_ids: Iterable[str], to: State, act: Act) -> dict[str, str]:
        """Move messages for which it is legal; return their ids and queues."""
        given = [message_id for message_id in message_ids if is_id(message_id)]
        if to not in _MOVES:
            raise ValueError(f"no operator may move a message to {to.name}")
        parameters: dict[str, Any] = {
            "now": self._now,
            "ids": ids(given),
            "actor": act.actor,
            "reason": act.reason,
            "key_window": round(limits.KEY_WINDOW * MICROSECONDS),
            "line_retention": LINE_RETENTION,
        }
        moved: dict[str, str] = dict(await self.wire.rows(_MOVES[to], parameters))
        if to is State.SCHEDULED:
            moved |= dict(await self.wire.rows("move_resume", parameters))
        elif moved:
            await self.journals.reply_for(list(moved), to)
        return {message_id: moved[message_id] for message_id in given if message_id in moved}

    async def register(
        self, kind: str, name: str, value: bytes | None, *, version: int, expires_at: int | None
    ) -> bool:
        statement = "register_delete" if value is None else "register_update" if version else "register_insert"
        parameters: dict[str, Any] = {
            "now": self._now,
            "kind": kind,
            "name": name,
            "value": value,
            "version": version,
            "expires_at": expires_at,
        }
        return bool(await self.wire.rows(statement, parameters))

    async def registered(self, kind: str, name: str) -> Registered | None:
        for value, version in await self.wire.rows("registered", {"now": self._now, "kind": kind, "name": name}):
            return Registered(value, version)
        return None

    async def now(self) -> int:
        now: int = (await self.wire.rows("now", {"now": self._now}))[0][0]
        return now

    async def entries(self, kind: str) -> dict[str, Registered]:
        rows = await self.wire.rows("entries", {"now": self._now, "kind": kind})
        return {name: Registered(value, version) for name, value, version in rows}

    async def restored(self, after: str, limit: int) -> tuple[int, str | None]:
        """Raise the fences of the next messages and end their leases; return how many ended, and the last message."""
        await self.wire.rows("restored_lock")
        ended, last = (await self.wire.rows("restored", {"after": after, "limit": limit, "leap": limits.FENCE_LEAP}))[0]
        return ended, last

    async def purge(self, limit: int) -> Purged:
        given = {"now": self._now, "limit": limit}
        kept = round(limits.ACT_RETENTION * MICROSECONDS)
        # One kind after the other: while there are messages to remove whole, emptying them would be wasted effort.
        messages, has_turn = (await self.wire.rows("purge_messages", given))[0]
        if messages == limit or not has_turn:
            return Purged(messages=messages)
        bodies: int = (await self.wire.rows("purge_bodies", given))[0][0]
        if bodies >= limit:
            return Purged(messages=messages, bodies=bodies)
        return Purged(
            messages=messages,
            bodies=bodies,
            keys=len(await self.wire.rows("purge_keys", given)),
            gates=len(await self.wire.rows("purge_gates", given)),
            acts=len(await self.wire.rows("purge_acts", {**given, "kept": kept})),
            register=len(await self.wire.rows("purge_register", given)),
        )

    # people

    async def find(self, query: Query) -> list[Record]:
        parameters: dict[str, Any] = {
            "now": self._now,
            "after": query.after or FIRST_ID,
            "queue": query.queue,
            "message_type": query.message_type,
            "correlation_id": query.correlation_id,
            "worker": query.worker,
            "crashes": query.crashes,
            "runs": query.runs,
            "limit": min(query.limit, limits.PAGE_MAX),
            "states": numbers([int(state) for state in query.states or State]),
            # An id that is not a UUID cannot be in the table, so it is not an error to look for it.
            "ids": ids([message_id for message_id in query.ids or () if is_id(message_id)]),
        }
        if (statement := statement_for(query)) == "find_correlated":
            parameters["root"] = query.correlation_id if is_id(query.correlation_id or "") else None
        return [record_of(row) for row in await self.wire.rows(statement, parameters)]

    async def attempts(self, message_id: str) -> list[Attempt]:
        if not is_id(message_id):
            return []
        return [attempt_of(row) for row in await self.wire.rows("attempts", {"id": message_id})]

    async def count(self) -> dict[str, Counts]:
        counts: dict[str, dict[str, Any]] = {}
        for queue, state, number in await self.wire.rows("count_alive"):
            counts.setdefault(queue, {})[State(state).name.lower()] = number
        for queue, number, oldest_at in await self.wire.rows("count_dead"):
            counts.setdefault(queue, {}).update(dead=number, oldest_dead_at=oldest_at)
        return {queue: Counts(**numbers) for queue, numbers in counts.items()}
