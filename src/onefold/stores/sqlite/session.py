"""The verbs on one SQLite connection, inside one open transaction.

Everything here is plain blocking code: the store decides in which thread it runs.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import apsw
import msgspec

from onefold import limits
from onefold.clock import MICROSECONDS, Clock
from onefold.envelope import Envelope
from onefold.errors import KeyReuseError
from onefold.step import Step
from onefold.store import (
    Act,
    Again,
    Attempt,
    Counts,
    Dead,
    Done,
    Fenced,
    HandBack,
    Lane,
    Lease,
    Outcome,
    Parked,
    Purged,
    PutOptions,
    Query,
    Record,
    Registered,
    State,
    Stored,
)
from onefold.stores import keys
from onefold.stores.keys import Holder, Verdict, judge, judge_deduplication
from onefold.stores.rows import allows, attempt_of, attempt_row, lease_of, message_row, outcome_row, record_of
from onefold.stores.sql import load_statements
from onefold.stores.sqlite.steps import Steps
from onefold.stores.steps import check_outside, notes_of

SQL = load_statements("onefold.stores.sqlite")

_encode = msgspec.json.Encoder().encode


def _json(values: list[Any]) -> str:
    """Write a list for ``json_each``, so that one statement serves many ids."""
    return _encode(values).decode()


class Session:
    """One connection and the clock that dates what is written through it."""

    def __init__(self, connection: apsw.Connection, clock: Clock) -> None:
        self.connection = connection
        self._clock = clock
        self._steps = Steps(connection)

    def rows(self, name: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Run a named statement."""
        return self.connection.execute(SQL[name], parameters).fetchall()

    def _each(self, name: str, parameters: Iterable[Sequence[Any]]) -> list[tuple[Any, ...]]:
        return self.connection.executemany(SQL[name], parameters).fetchall()

    def execute(self, statement: str, parameters: Sequence[Any] | Mapping[str, Any] = ()) -> list[tuple[Any, ...]]:
        return self.connection.execute(statement, parameters).fetchall()

    # put

    def put(self, envelopes: Sequence[Envelope], options: PutOptions) -> list[Stored]:
        now = self._clock.now()
        if options.batch_key is not None:
            return self._put_batch(envelopes, options.batch_key, now)
        won = self._take_new_keys([e for e in envelopes if e.keyed and e.deduplication_key is None])
        fresh: dict[str, Envelope] = {}
        answers: list[Stored] = []
        for e in envelopes:
            if e.id in won or (e.deduplication_key is None and not e.keyed):
                fresh[e.id] = e
                answers.append(Stored(e.id, State.SCHEDULED))
            else:
                answers.append(self._put_contested(e, options, now, fresh))
        known = self._insert(list(fresh.values()), now)
        return (
            [Stored(a.id, known[a.id]) if a.id in known and not a.duplicate else a for a in answers]
            if known
            else answers
        )

    def _take_new_keys(self, envelopes: Sequence[Envelope]) -> set[str]:
        """Take the keys nobody has, and return the ids of the messages that hold theirs now."""
        rows = [(e.scope, e.idempotency_key, 0, e.id, e.fingerprint, e.schema_version, None) for e in envelopes]
        if self._changes("put_key", rows) == len(rows):
            return {row[3] for row in rows}
        owners = {row[0] for row in self._each("key_owner", (row[:3] for row in rows))}
        return owners & {row[3] for row in rows}

    def _changes(self, name: str, rows: Sequence[Sequence[Any]]) -> int:
        """Run a statement for each row and return how many rows it wrote; cheaper than asking for each."""
        before = self.connection.total_changes()
        self._each(name, rows)
        return self.connection.total_changes() - before

    def _put_contested(self, e: Envelope, options: PutOptions, now: int, fresh: dict[str, Envelope]) -> Stored:
        """Store a message whose key is taken, or which has two keys: the idempotency key decides first."""
        free: list[tuple[str, int, int | None]] = []
        for kind, key, decide in (
            (keys.IDEMPOTENCY, e.idempotency_key if e.keyed else None, judge),
            (keys.DEDUPLICATION, e.deduplication_key, judge_deduplication),
        ):
            if key is None:
                continue
            holder = self._holder(e.scope, key, kind, fresh)
            verdict = Verdict.FREE if holder is None else decide(holder, e, now)
            if holder is None or verdict is Verdict.FREE:
                free.append((key, kind, now + e.deduplicate_for if kind else None))
                continue
            if verdict is Verdict.DUPLICATE:
                self.rows("count_suppressed", e.scope, key, kind)
                if options.if_dead == "redrive" and holder.state is State.DEAD:
                    act = Act(actor="sender", reason="sent again with if_dead='redrive'")
                    if self.move([holder.message_id], State.SCHEDULED, act):
                        return Stored(holder.message_id, State.SCHEDULED, duplicate=True)
            return Stored(
                holder.message_id,
                holder.state or State.SCHEDULED,
                duplicate=verdict is Verdict.DUPLICATE,
                clash=verdict is Verdict.CLASH,
            )
        for key, kind, expires_at in free:
            row = (e.scope, key, kind, e.id, e.fingerprint, e.schema_version, expires_at)
            self._changes("put_key", [row]) or self.rows("take_key", *row)
        fresh[e.id] = e
        return Stored(e.id, State.SCHEDULED)

    def _holder(self, scope: str, key: str, kind: int, fresh: Container[str] = ()) -> Holder | None:
        for message_id, fingerprint, version, expires_at, state, kept_until in self.rows(
            "key_holder", scope, key, kind
        ):
            if state is None and message_id in fresh:
                state = State.SCHEDULED  # put a moment ago in this very call, its rows are about to be written
            return Holder(
                message_id, fingerprint, version, expires_at, None if state is None else State(state), kept_until
            )
        return None

    def _put_batch(self, envelopes: Sequence[Envelope], batch_key: str, now: int) -> list[Stored]:
        """All or nothing: every message is new, or every message is the one of the first time."""
        fingerprint = keys.batch_fingerprint(list(envelopes))
        holder = self._holder(keys.BATCH_SCOPE, batch_key, keys.BATCH)
        answers = self.put(envelopes, PutOptions())
        known = [a for a in answers if a.duplicate or a.clash]
        same = holder is None or holder.fingerprint == fingerprint
        if same and len(known) == len(answers) and not any(a.clash for a in answers):
            return answers
        if known or (not same and holder is not None and holder.state is not None):
            raise KeyReuseError("batch", batch_key, known[0].id if known else holder.message_id if holder else "")
        row = (
            keys.BATCH_SCOPE,
            batch_key,
            keys.BATCH,
            envelopes[0].id,
            fingerprint,
            1,
            now + round(limits.KEY_WINDOW * MICROSECONDS),
        )
        self._changes("put_key", [row]) or self.rows("take_key", *row)
        return answers

    def _insert(self, envelopes: Sequence[Envelope], now: int) -> dict[str, State]:
        """Write messages and their deliveries; return where those stand that were there already."""
        known: dict[str, State] = {}
        if self._changes("put_message", [message_row(e, now) for e in envelopes]) != len(envelopes):
            # The answer to an earlier put was lost, and it is asked again: what has a state must not begin anew.
            found = {e.id: self.rows("message_state", e.id)[0][0] for e in envelopes}
            known = {id_: State(state) for id_, state in found.items() if state is not None}
        self._each("put_delivery", [_delivery_row(e, now) for e in envelopes if e.id not in known])
        return known

    # claim

    def claim(
        self, queues: Sequence[str], *, types: Sequence[str], limit: int, lease: float, worker: str, lane: Lane
    ) -> list[Lease]:
        now, steady = self._clock.now(), self._clock.steady()
        self.rows("claim_expired", steady)
        known = _json(list(types))
        statement, *bounds = _SELECT_OF[lane]
        rows: list[tuple[Any, ...]] = []
        for queue in queues:
            rows += self.rows(statement, queue, now, known, limit - len(rows), *bounds)
            if len(rows) >= limit:
                break
        until = steady + round(lease * MICROSECONDS)
        suspect_after = limits.SUSPECT_AFTER if lane is Lane.ANY else limits.INTEGER_MAX
        self.rows("claim_take", until, worker, suspect_after, _json([row[0] for row in rows]))
        return [lease_of(row, claimed_at=now, worker=worker) for row in rows]

    def claim_possible(self, queues: Sequence[str], types: Sequence[str], lane: Lane) -> bool:
        statement, *bounds = _POSSIBLE_OF[lane]
        given = (self._clock.steady(), _json(list(queues)), self._clock.now(), _json(list(types)))
        return bool(self.rows(statement, *given, *bounds)[0][0])

    def extend(self, leases: Sequence[Fenced], lease: float, starting: bool) -> list[bool]:
        until = self._clock.steady() + round(lease * MICROSECONDS)
        held = set(self._each("extend", ((until, int(starting), one.id, one.fence) for one in leases)))
        return [(one.id, one.fence) in held for one in leases]

    # settle

    def settle(self, settlements: Sequence[tuple[Lease, Outcome]]) -> list[bool]:
        now = self._clock.now()
        ended = [(lease, o) for lease, o in settlements if isinstance(o, Done | Dead)]
        again = [(lease, o) for lease, o in settlements if isinstance(o, Again)]
        back = [lease for lease, o in settlements if isinstance(o, HandBack)]
        parked = [(lease, o) for lease, o in settlements if isinstance(o, Parked)]
        # Told apart by fence as well: a worker may settle an old and a new lease of one message together.
        won = set(self.rows("settle_end", _json([(lease.id, lease.fence) for lease, _ in ended]))) if ended else set()
        won.update(self._each("settle_again", (_again_row(lease, o, now) for lease, o in again)))
        won.update(self._each("settle_hand_back", ((lease.id, lease.fence) for lease in back)))
        won.update(self._steps.park(parked, now) if parked else ())
        held = [(lease, o) for lease, o in settlements if (lease.id, lease.fence) in won]
        self._each("settle_outcome", (outcome_row(lease, o, now) for lease, o in held if isinstance(o, Done | Dead)))
        failed = (attempt_row(lease, o, now) for lease, o in held if isinstance(o, Again | Dead | Parked))
        self._each("settle_attempt", (row for row in failed if row is not None))
        sends = [e for _, o in held if isinstance(o, Done | Parked) for e in o.sends]
        if sends:
            self.put_sends(sends)
        for lease, o in held if parked else ():
            if isinstance(o, Parked):
                self._steps.write(lease.id, o.steps, now)
        if notes := notes_of(held):
            self._steps.tell(notes, now)
        return [(lease.id, lease.fence) in won for lease, _ in settlements]

    def put_sends(self, envelopes: Sequence[Envelope]) -> None:
        """Put what handlers sent; a key that clashes fails the handler that sent it."""
        for e, stored in zip(envelopes, self.put(envelopes, PutOptions()), strict=True):
            if stored.clash:
                raise KeyReuseError(e.message_type, e.idempotency_key, stored.id)

    # operators

    def move(self, ids: Iterable[str], to: State, act: Act) -> list[str]:
        now = self._clock.now()
        moved: list[str] = []
        for id_ in ids:
            name = _MOVE_NAMES.get(to, "")
            if to is State.SCHEDULED and self._steps.resume(id_, now):
                legal, name = True, "resume"
            elif to is State.SCHEDULED:
                legal = bool(self.rows("move_redrive", now, id_)) and not self.rows("move_reopened", id_)
            elif to is State.DISCARDED:
                legal = bool(self.rows("move_discard", now, id_))
            elif to is State.CANCELLED:
                kept_until = now + round(limits.KEY_WINDOW * MICROSECONDS)
                legal = bool(self.rows("move_cancel", now, kept_until, id_)) and not self.rows("move_cancelled", id_)
            else:
                raise ValueError(f"no operator may move a message to {to.name}")
            if legal:
                self.event(id_, name, act)
                moved.append(id_)
                if to is not State.SCHEDULED:
                    self._steps.reply_for(id_, to, now)
        return moved

    def event(self, message_id: str, kind: str, act: Act) -> None:
        """Write down what a person did."""
        self.rows("move_event", self._clock.now(), message_id, kind, act.actor, act.reason)

    # journals

    def record(self, owner: Fenced | str, steps: Sequence[Step], act: Act | None = None) -> list[Step] | None:
        """Record for a lease, for somebody else or for a person; None when the lease is lost."""
        now = self._clock.now()
        if not isinstance(owner, str):
            return self._steps.by_owner(owner, steps, now)
        if act is None:
            check_outside(steps)
            return self._steps.by_others(owner, steps, now)
        if stand := self._steps.by_hand(owner, steps, now):
            self.event(owner, "resolve", act)
        return stand

    def rewind(self, message_id: str, step: str, act: Act) -> list[Step]:
        if forgotten := self._steps.rewind(message_id, step, self._clock.now()):
            self.event(message_id, "restart", act)
        return forgotten

    def steps(self, message_id: str) -> list[Step]:
        return self._steps.read(message_id)

    def register(self, kind: str, name: str, value: bytes | None, *, version: int, expires_at: int | None) -> bool:
        now = self._clock.now()
        if value is None:
            return bool(self.rows("register_delete", kind, name, version))
        if version == 0:
            return bool(self.rows("register_insert", kind, name, value, expires_at, now))
        return bool(self.rows("register_update", kind, name, value, expires_at, now, version))

    def registered(self, kind: str, name: str) -> Registered | None:
        for value, version in self.rows("registered", kind, name, self._clock.now()):
            return Registered(value, version)
        return None

    def entries(self, kind: str) -> dict[str, Registered]:
        found = self.rows("entries", kind, self._clock.now())
        return {name: Registered(value, version) for name, value, version in found}

    def restored(self) -> int:
        leases: int = self.rows("restored_leases")[0][0]
        self.rows("restored_deliveries", limits.FENCE_LEAP)
        self.rows("restored_outcomes", limits.FENCE_LEAP)
        return leases

    def purge(self, limit: int) -> Purged:
        now = self._clock.now()
        bodies = self.rows("purge_bodies", now, limit)
        self._each("purge_body", bodies)
        self._each("purge_body_done", bodies)
        gone = self.rows("purge_messages", now, limit)
        self._each("purge_message_key", ((scope, key, id_) for id_, scope, key in gone))
        for name in ("purge_message", "purge_outcome", "purge_attempts"):
            self._each(name, ((row[0],) for row in gone))
        self._steps.purge([row[0] for row in gone])
        self.rows("purge_keys", now, limit)
        self.rows("purge_register", now, limit)
        return Purged(bodies=len(bodies), messages=len(gone), register=self.connection.changes())

    # people

    def find(self, query: Query) -> list[Record]:
        limit = min(query.limit, limits.PAGE_MAX)
        given = (query.after, query.queue, query.message_type, query.correlation_id, limit)
        # Crashes are asked for among the living only.
        states = _json([int(s) for s in query.states or State if query.crashes is None or not s.ended])
        if query.ids is not None:
            found = [record_of(row) for row in self.rows("find_ids", _json(list(query.ids)))]
            return [record for record in found if allows(query, record)]
        if query.worker is not None:
            rows = self.rows("find_leased", query.worker, *given, states, query.crashes)
        elif query.crashes:
            rows = self.rows("find_crashed", query.crashes, *given, states)
        elif query.states == (State.DEAD,):
            rows = self.rows("find_dead", *given)
        else:
            rows = self.rows("find_any", *given, states)
        return [record_of(row) for row in rows]

    def attempts(self, message_id: str) -> list[Attempt]:
        return [attempt_of(row) for row in self.rows("attempts", message_id)]

    def count(self) -> dict[str, Counts]:
        counts: dict[str, dict[str, int]] = {}
        for queue, state, number in self.rows("count_alive"):
            counts.setdefault(queue, {})[State(state).name.lower()] = number
        for queue, number in self.rows("count_dead"):
            counts.setdefault(queue, {})["dead"] = number
        return {queue: Counts(**numbers) for queue, numbers in counts.items()}


#: The statements of each lane, and how many crashes they allow where they ask.
_SELECT_OF: dict[Lane, tuple[Any, ...]] = {
    Lane.ANY: ("claim_select", limits.INTEGER_MAX),
    Lane.MAIN: ("claim_select", 0),
    Lane.PROBATION: ("claim_select_crashed",),
}
_POSSIBLE_OF: dict[Lane, tuple[Any, ...]] = {
    Lane.ANY: ("claim_possible", limits.INTEGER_MAX),
    Lane.MAIN: ("claim_possible", 0),
    Lane.PROBATION: ("claim_possible_crashed",),
}
_MOVE_NAMES = {State.SCHEDULED: "redrive", State.DISCARDED: "discard", State.CANCELLED: "cancel"}


def _delivery_row(e: Envelope, now: int) -> tuple[Any, ...]:
    due_at = e.due_at or now + e.delay
    return (e.id, e.queue, e.claimed_as, due_at, due_at + e.retention if e.retention else 0)


def _again_row(lease: Lease, outcome: Again, now: int) -> tuple[Any, ...]:
    attempt = lease.attempt if outcome.counted else lease.attempt - 1
    due_at = now + round(outcome.delay * MICROSECONDS)
    return (attempt, int(outcome.crashed), due_at, lease.id, lease.fence)
