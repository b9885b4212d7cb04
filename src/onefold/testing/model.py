"""A model of a store in plain Python, without SQL: the reference with which real stores are compared.

It knows the rules and not the numbers: a store may choose any fences that rise.
A lease that ran out and was not claimed again may be shown as leased or as scheduled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from onefold import limits
from onefold.clock import MICROSECONDS
from onefold.message.envelope import Envelope
from onefold.store import Again, Dead, Done, HandBack, Lease, Outcome, Parked, PutOptions, Record, State, Stored

IDEMPOTENCY, DEDUPLICATION = "idempotency", "deduplication"


@dataclass(slots=True)
class Message:
    """One message as the model sees it."""

    envelope: Envelope
    due_at: int
    state: State = State.SCHEDULED
    #: The highest fence seen; the store must never show a lower one.
    fence: int = 0
    #: The fence of the lease that may settle it; None if no lease may.
    holder: int | None = None
    lease_until: int = 0
    claimed: bool = False
    attempt: int = 0
    failures: int = 0
    replay_count: int = 0
    kept_until: int | None = None
    body_until: int = 0
    body: bool = True
    result: bytes | None = None
    #: The number of lines that others recorded, the number at which it is woken, and the names of its signals.
    wake: int = 0
    wake_target: int = 0
    told: set[str] = field(default_factory=set)

    def allows(self, record: Record, now: int) -> bool:
        """Whether the store may show this of the message now; remembers the fence."""
        between = self.state is State.LEASED and self.lease_until <= now
        state = record.state in (State.LEASED, State.SCHEDULED) if between else record.state is self.state
        shown = (record.attempt, record.replay_count, record.kept_until, record.result)
        # A result is hidden once its window is over, whether or not a purge has removed it.
        result = self.result if self.kept_until is None or self.kept_until > now else None
        body = (record.envelope.payload_inline is not None) is self.body
        risen, self.fence = record.fence >= self.fence, max(self.fence, record.fence)
        return state and body and risen and shown == (self.attempt, self.replay_count, self.kept_until, result)


@dataclass(slots=True)
class _Key:
    message_id: str
    fingerprint: bytes
    expires_at: int | None


@dataclass(slots=True)
class Model:
    """All messages of one queue and one type, and the keys they hold."""

    now: int = 0
    messages: dict[str, Message] = field(default_factory=dict)
    keys: dict[tuple[str, str], _Key] = field(default_factory=dict)

    # put

    def put(self, e: Envelope, options: PutOptions) -> Stored:
        """Answer as the table of the second send says; the idempotency key is looked up first."""
        named = [(IDEMPOTENCY, e.idempotency_key)] if e.keyed else []
        named += [(DEDUPLICATION, e.deduplication_key)] if e.deduplication_key is not None else []
        for kind, key in named:
            held = self._held(kind, key, e.id)
            if held is None:
                continue
            first = self.messages[held.message_id]
            if held.message_id == e.id:
                return Stored(e.id, first.state)
            if kind == IDEMPOTENCY and held.fingerprint != e.fingerprint:
                return Stored(held.message_id, first.state, clash=True)
            if options.if_dead == "redrive" and first.state is State.DEAD:
                self.redrive(held.message_id)
            return Stored(held.message_id, first.state, duplicate=True)
        for kind, key in named:
            expires_at = self.now + e.deduplicate_for if kind == DEDUPLICATION else None
            self.keys[kind, key] = _Key(e.id, e.fingerprint, expires_at)
        self.messages.setdefault(e.id, Message(e, e.due_at or self.now + e.delay))
        return Stored(e.id, self.messages[e.id].state)

    def _held(self, kind: str, key: str, by: str) -> _Key | None:
        """Return the key if a message still holds it."""
        held = self.keys.get((kind, key))
        if held is None or held.message_id not in self.messages:
            return None
        holder = self.messages[held.message_id]
        if held.expires_at is not None:
            taken_back = holder.state in (State.CANCELLED, State.DISCARDED)
            over = held.expires_at <= self.now or taken_back
        else:
            kept_until = holder.kept_until
            over = kept_until is not None and kept_until <= self.now
        return None if over and held.message_id != by else held

    # claim

    def claimable(self) -> list[Message]:
        """Return the messages that a claim may take, the longest due first."""
        return sorted((m for m in self.messages.values() if self._free(m)), key=lambda m: m.due_at)

    def _free(self, m: Message) -> bool:
        if m.state is State.LEASED:
            return m.lease_until <= self.now
        return m.state in (State.SCHEDULED, State.PARKED) and m.due_at <= self.now

    def claim(self, leases: Sequence[Lease], limit: int, seconds: float) -> None:
        """Check the messages of a claim, and apply it; any order among equally due messages is right."""
        free = self.claimable()
        taken = [self.messages[lease.id] for lease in leases]
        assert len(leases) == min(limit, len(free)) == len({lease.id for lease in leases})
        assert all(self._free(m) for m in taken)
        assert [m.due_at for m in taken] == [m.due_at for m in free[: len(taken)]]
        for lease, m in zip(leases, taken, strict=True):
            assert lease.fence > m.fence
            assert (lease.attempt, lease.replay_count, lease.wake) == (m.attempt + 1, m.replay_count, m.wake)
            m.state, m.fence, m.holder, m.claimed = State.LEASED, lease.fence, lease.fence, True
            m.lease_until = self.now + round(seconds * MICROSECONDS)

    def extend(self, lease: Lease, held: bool, seconds: float) -> None:
        """Check and apply an extension; it may fail if the lease ran out, and must fail if it was taken over."""
        m = self.messages.get(lease.id)
        holds = m is not None and m.holder == lease.fence
        if m is None or not holds or m.lease_until > self.now:
            assert held is holds
        if m is not None and held:
            m.lease_until = self.now + round(seconds * MICROSECONDS)

    # settle

    def settle(self, lease: Lease, outcome: Outcome) -> bool:
        """Return whether the lease may settle, and apply the outcome if so."""
        m = self.messages.get(lease.id)
        if m is None or m.holder != lease.fence:
            return False
        m.holder = None
        if isinstance(outcome, Done | Dead):
            m.state = State.DONE if isinstance(outcome, Done) else State.DEAD
            m.kept_until = self.now + round(outcome.key_window * MICROSECONDS)
            m.body_until = self.now + round(outcome.body_retention * MICROSECONDS)
            m.result = outcome.result if isinstance(outcome, Done) else None
        elif isinstance(outcome, Parked):
            self._park(m, outcome)
        else:
            m.state = State.SCHEDULED
            m.fence += 1
        if isinstance(outcome, Again):
            m.due_at = self.now + round(outcome.delay * MICROSECONDS)
        counted = isinstance(outcome, Dead) or (isinstance(outcome, Again) and outcome.counted)
        m.attempt = lease.attempt if counted else lease.attempt - 1
        if isinstance(outcome, Parked) and outcome.failure is None:
            m.attempt = 0
        if not isinstance(outcome, Done | HandBack) and outcome.failure is not None:
            m.failures += 1
        for child in outcome.sends if isinstance(outcome, Done | Parked) else ():
            self.put(child, PutOptions())
        return True

    def _park(self, m: Message, outcome: Parked) -> None:
        m.fence += 1
        m.wake_target = outcome.seen + outcome.awaits if outcome.awaits else limits.INTEGER_MAX
        delay = None if outcome.delay is None else round(outcome.delay * MICROSECONDS)
        m.due_at = limits.INSTANT_MAX if delay is None else self.now + delay
        m.state = State.PARKED
        self._wake(m)

    def _wake(self, m: Message) -> None:
        if m.state is State.PARKED and m.wake >= m.wake_target:
            m.state, m.due_at = State.SCHEDULED, min(m.due_at, self.now)

    def tell(self, id_: str, signal: str) -> bool:
        """Record a signal of another message; return whether the message exists and may be signalled."""
        m = self.messages.get(id_)
        if m is None or (m.state.ended and m.state is not State.DEAD):
            return False
        if signal not in m.told:
            m.told.add(signal)
            # A redriven message starts its count anew.
            m.wake += not m.state.ended
            self._wake(m)
        return True

    # operators

    def redrive(self, id_: str) -> bool:
        """Reopen a dead letter within its retention, or wake a parked message."""
        m = self.messages.get(id_)
        if m is not None and m.state is State.PARKED:
            m.state, m.due_at, m.fence = State.SCHEDULED, min(m.due_at, self.now), m.fence + 1
            return True
        if m is None or m.state is not State.DEAD or min(m.kept_until or 0, m.body_until) <= self.now:
            return False
        m.wake = 0
        m.state, m.due_at, m.attempt, m.kept_until = State.SCHEDULED, self.now, 0, None
        m.replay_count, m.fence = m.replay_count + 1, m.fence + 1
        return True

    def discard(self, id_: str) -> bool:
        """Close a dead letter for good, which frees its key."""
        m = self.messages.get(id_)
        if m is None or m.state is not State.DEAD:
            return False
        m.state, m.kept_until, m.body_until, m.fence = State.DISCARDED, self.now, self.now, m.fence + 1
        return True

    def cancel(self, id_: str) -> bool:
        """Cancel a living message; its key is free if it was never claimed."""
        m = self.messages.get(id_)
        if m is None or m.state.ended:
            return False
        m.state, m.holder, m.fence = State.CANCELLED, None, m.fence + 1
        m.kept_until = m.body_until = self.now + (round(limits.KEY_WINDOW * MICROSECONDS) if m.claimed else 0)
        return True

    def purge(self) -> None:
        """Remove everything past its retention."""
        for id_, m in list(self.messages.items()):
            if m.kept_until is not None and m.kept_until <= self.now:
                del self.messages[id_]
            elif m.kept_until is not None and m.body_until <= self.now:
                m.body = False
        for name, key in list(self.keys.items()):
            expired = key.expires_at is not None and key.expires_at <= self.now
            if expired or (key.expires_at is None and key.message_id not in self.messages):
                del self.keys[name]
