"""Put: a message comes to rest under its number, or the one that already holds its key is reported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from onefold import limits
from onefold.clock import MICROSECONDS
from onefold.envelope import Envelope
from onefold.errors import KeyReuseError
from onefold.store import KEEP, Act, PutOptions, State, Stored
from onefold.stores import keys
from onefold.stores.gating import FIRST_PLACE
from onefold.stores.keys import Holder, Verdict, judge, judge_deduplication
from onefold.stores.rows import message_row
from onefold.stores.sqlite.delivering import ARRIVALS_MAX, arrive
from onefold.stores.sqlite.drivers import ERRORS, is_constraint
from onefold.stores.sqlite.operating import move
from onefold.stores.sqlite.session import SQL, Row, Session, as_json

_SCHEDULED = State.SCHEDULED
_PUT_LONE = SQL["put_lone"]


def put(session: Session, envelopes: Sequence[Envelope], options: PutOptions = KEEP) -> list[Stored]:
    """Store messages; one whose key is taken is reported, not stored."""
    if options.batch_key is not None:
        return _put_batch(session, envelopes, options.batch_key)
    now = session.clock.now()
    last: int = session.rows("put_last")[0][0]
    # Every envelope has its number, also one that will turn out to be there already: numbers are plenty.
    numbered = list(enumerate(envelopes, last + 1))
    in_turn = keys.in_turn(envelopes)
    keyed = [_key_row(seq, e) for seq, e in numbered if e.keyed and e.id not in in_turn]
    if session.changes("put_key", keyed) == len(keyed) and not in_turn:
        fresh, answers = numbered, [Stored(e.id, _SCHEDULED) for e in envelopes]
    else:
        fresh, answers = _settle_contest(session, numbered, keyed, options)
    known = _insert(session, fresh, now)
    if not known:
        return answers
    return [Stored(a.id, known[a.id]) if a.id in known and not a.duplicate else a for a in answers]


def put_lone(session: Session, e: Envelope) -> Stored | None:
    """Store one message by one statement, outside of any transaction; durable then.

    None, and nothing is written, if it takes more than that: its key is taken, it is not due at once or waits at a
    gate, or too many messages have not been delivered.
    """
    row = message_row(e, session.clock.now())
    # All that is special about a message stands in its headers, but for its time; most have none.
    special = row[-1] is not None and (e.deduplication_key is not None or e.pinned or _is_gated(e))
    if special or e.delay or e.due_at or session.arrivals >= ARRIVALS_MAX:
        return None
    try:
        session.connection.execute(_PUT_LONE, (*row, e.fingerprint if e.keyed else None))
    except ERRORS as error:
        if not is_constraint(error):
            raise
        return None
    session.arrivals += 1
    return Stored(e.id, _SCHEDULED)


def put_sends(session: Session, envelopes: Sequence[Envelope]) -> dict[str, str]:
    """Put what handlers sent and return under which id each is kept; a key that clashes fails its handler."""
    answers = put(session, envelopes)
    for e, stored in zip(envelopes, answers, strict=True):
        if stored.clash:
            raise KeyReuseError(e.message_type, e.idempotency_key, stored.id)
    return {e.id: stored.id for e, stored in zip(envelopes, answers, strict=True)}


def _key_row(seq: int, e: Envelope) -> Row:
    return (e.message_type, e.idempotency_key, keys.IDEMPOTENCY, seq, e.fingerprint, e.schema_version, None)


def _insert(session: Session, fresh: list[tuple[int, Envelope]], now: int) -> dict[str, State]:
    """Write messages, and those deliveries that cannot wait; return where those stand that were there already."""
    rows = [(seq, *message_row(e, now)) for seq, e in fresh]
    known: dict[str, State] = {}
    if session.changes("put_message", rows) != len(rows):
        # The answer to an earlier put was lost, and it is asked again: what is there must not begin anew.
        stand = {id_: (seq, state) for id_, seq, state in session.rows("put_known", as_json([e.id for _, e in fresh]))}
        for seq, e in fresh:
            if stand[e.id][0] != seq:
                _point_keys(session, e, seq, stand[e.id][0])
        fresh = [(seq, e) for seq, e in fresh if stand[e.id][0] == seq]
        known = {id_: State(state) for id_, (_, state) in stand.items()}
    if special := [(seq, e) for seq, e in fresh if _is_timed(e) or _is_gated(e)]:
        session.each("put_delivery", [(seq, *_delivery(e, now)) for seq, e in special if not _is_gated(e)])
        session.each("put_gated", [_gated_row(seq, e, now) for seq, e in special if _is_gated(e)])
    arrive(session, len(fresh))
    return known


def _point_keys(session: Session, e: Envelope, seq: int, known: int) -> None:
    """Point the keys of a message at its number, not at one that was not used and will be another message's."""
    for kind, key in ((keys.IDEMPOTENCY, e.idempotency_key), (keys.DEDUPLICATION, e.deduplication_key)):
        session.run("point_key", e.scope, key, kind, seq, known)


def _is_timed(e: Envelope) -> bool:
    """Whether it is not simply due when it comes, for any worker that knows its type."""
    return bool(e.delay or e.due_at) or e.pinned


def _is_gated(e: Envelope) -> bool:
    """Whether it takes more than the common row: a gate, a line or a priority."""
    return e.gate is not None or e.ordering_key is not None or e.priority > 0


def _delivery(e: Envelope, now: int) -> Row:
    """Return what a delivery says beside its number."""
    due_at = e.due_at or now + e.delay
    return (e.queue, e.claimed_as, due_at, due_at + e.retention if e.retention else 0)


def _gated_row(seq: int, e: Envelope, now: int) -> Row:
    place = None if e.ordering_key is None else FIRST_PLACE + seq if e.sequence is None else e.sequence
    return (seq, *_delivery(e, now), e.priority, e.gated_by, place)


def _settle_contest(
    session: Session, numbered: list[tuple[int, Envelope]], keyed: list[Row], options: PutOptions
) -> tuple[list[tuple[int, Envelope]], list[Stored]]:
    """Decide one by one, in their order: some of these keys were taken already, or are wanted by several."""
    won = {row[3] for row in keyed if session.rows("key_owner", *row[:3]) == [(row[3],)]}
    fresh: dict[str, tuple[int, Envelope]] = {}
    answers: list[Stored] = []
    for seq, e in numbered:
        if seq in won or (e.deduplication_key is None and not e.keyed):
            fresh.setdefault(e.id, (seq, e))
            answers.append(Stored(e.id, State.SCHEDULED))
        else:
            answers.append(_put_contested(session, seq, e, options, fresh))
    return list(fresh.values()), answers


def _put_contested(
    session: Session, seq: int, e: Envelope, options: PutOptions, fresh: dict[str, tuple[int, Envelope]]
) -> Stored:
    """Store a message whose key is taken, or which has two keys: the idempotency key decides first."""
    now = session.clock.now()
    free: list[tuple[str, int, int | None]] = []
    for kind, key, decide in (
        (keys.IDEMPOTENCY, e.idempotency_key if e.keyed else None, judge),
        (keys.DEDUPLICATION, e.deduplication_key, judge_deduplication),
    ):
        if key is None:
            continue
        holder = _holder(session, e.scope, key, kind, fresh)
        verdict = Verdict.FREE if holder is None else decide(holder, e, now)
        if holder is None or verdict is Verdict.FREE:
            free.append((key, kind, now + e.deduplicate_for if kind else None))
        else:
            return _report(session, (e.scope, key, kind), holder, verdict, options)
    for key, kind, expires_at in free:
        _take_key(session, (e.scope, key, kind, seq, e.fingerprint, e.schema_version, expires_at))
    fresh.setdefault(e.id, (seq, e))
    return Stored(e.id, State.SCHEDULED)


def _report(
    session: Session, key: tuple[str, str, int], holder: Holder, verdict: Verdict, options: PutOptions
) -> Stored:
    """Say who holds the key; a dead letter is reopened if the sender wants that."""
    if verdict is Verdict.DUPLICATE:
        session.run("count_suppressed", *key)
        if options.if_dead == "redrive" and holder.state is State.DEAD:
            act = Act(actor="sender", reason="sent again with if_dead='redrive'")
            if move(session, [holder.message_id], State.SCHEDULED, act):
                return Stored(holder.message_id, State.SCHEDULED, duplicate=True)
    return Stored(
        holder.message_id,
        holder.state or State.SCHEDULED,
        duplicate=verdict is Verdict.DUPLICATE,
        clash=verdict is Verdict.CLASH,
    )


def _take_key(session: Session, row: Row) -> None:
    if not session.changes("put_key", [row]):
        session.run("take_key", *row)


def _holder(
    session: Session, scope: str, key: str, kind: int, fresh: Mapping[str, tuple[int, Envelope]]
) -> Holder | None:
    for seq, id_, fingerprint, version, expires_at, state, kept_until in session.rows("key_holder", scope, key, kind):
        if id_ is None:
            # Put a moment ago in this very call: its rows are about to be written.  Otherwise the holder is gone.
            id_ = next((one for one, (number, _) in fresh.items() if number == seq), "")
            state = State.SCHEDULED if id_ else None
        return Holder(id_, fingerprint, version, expires_at, None if state is None else State(state), kept_until)
    return None


def _put_batch(session: Session, envelopes: Sequence[Envelope], batch_key: str) -> list[Stored]:
    """All or nothing: every message is new, or every message is the one of the first time."""
    fingerprint = keys.batch_fingerprint(envelopes)
    holder = _holder(session, keys.BATCH_SCOPE, batch_key, keys.BATCH, {})
    answers, now = put(session, envelopes), session.clock.now()
    if keys.judge_batch(batch_key, fingerprint, holder, answers, now) is Verdict.FREE:
        first: int = session.rows("lease_rows", as_json([envelopes[0].id]))[0][1]
        expires_at = now + round(limits.KEY_WINDOW * MICROSECONDS)
        _take_key(session, (keys.BATCH_SCOPE, batch_key, keys.BATCH, first, fingerprint, 1, expires_at))
    return answers
