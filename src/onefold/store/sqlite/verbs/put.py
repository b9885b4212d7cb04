"""Put: a message is stored with its key and its delivery, or the one that already holds its key is reported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from onefold import limits
from onefold.clock import MICROSECONDS
from onefold.errors import KeyReuseError
from onefold.message.envelope import Envelope
from onefold.store import KEEP, Act, PutOptions, State, Stored
from onefold.store.shared import duplicates as keys
from onefold.store.shared.duplicates import Holder, Verdict, judge, judge_deduplication
from onefold.store.shared.rows import message_row
from onefold.store.sqlite.numbers import give_numbers, numbers_of
from onefold.store.sqlite.session import Row, Session, as_json
from onefold.store.sqlite.verbs.move import move

_SCHEDULED = State.SCHEDULED


def put(session: Session, envelopes: Sequence[Envelope], options: PutOptions = KEEP) -> list[Stored]:
    """Store messages; one whose key is taken is reported, not stored."""
    if options.batch_key is not None:
        return _put_batch(session, envelopes, options.batch_key)
    now = session.clock.now()
    numbers, stored = give_numbers(session, envelopes)
    numbered = list(zip(numbers, envelopes, strict=True))
    in_turn = keys.in_turn(envelopes)
    keyed = [_key_row(seq, e) for seq, e in numbered if e.keyed and e.id not in in_turn]
    if session.changes("put_key", keyed) == len(keyed) and not in_turn:
        fresh, answers = numbered, [Stored(e.id, _SCHEDULED) for e in envelopes]
    else:
        fresh, answers = _settle_contest(session, numbered, keyed, options)
    # The answer to an earlier put was lost, and it is asked again: a message that is there must not begin anew.
    _insert(session, {seq: e for seq, e in fresh if e.id not in stored}, now)
    if not stored:
        return answers
    known = {id_: State(state) for id_, state in session.rows("states", as_json(list(stored.values())))}
    return [Stored(a.id, known[a.id]) if a.id in known and not a.duplicate else a for a in answers]


def put_sends(session: Session, envelopes: Sequence[Envelope]) -> dict[str, str]:
    """Put what handlers sent and return under which id each is kept; a key that clashes fails its handler."""
    answers = put(session, envelopes)
    for e, stored in zip(envelopes, answers, strict=True):
        if stored.clash:
            raise KeyReuseError(e.message_type, e.idempotency_key, stored.id)
    return {e.id: stored.id for e, stored in zip(envelopes, answers, strict=True)}


def _key_row(seq: int, e: Envelope) -> Row:
    return (e.message_type, e.idempotency_key, keys.IDEMPOTENCY, seq, e.fingerprint, e.schema_version, None)


def _insert(session: Session, fresh: dict[int, Envelope], now: int) -> None:
    """Write messages and their deliveries."""
    session.each("put_message", [(seq, *message_row(e, now)) for seq, e in fresh.items()])
    special = [_delivery_row(seq, e, now) for seq, e in fresh.items() if not _is_plain(e)]
    if len(special) < len(fresh):
        session.run("put_deliveries", as_json([seq for seq, e in fresh.items() if _is_plain(e)]))
    session.each("put_delivery", special)


def _is_plain(e: Envelope) -> bool:
    """Whether it is due when it comes, for any worker that knows its type, and waits at no gate."""
    return not (e.delay or e.due_at or e.pinned or e.gate is not None or e.ordering_key is not None or e.priority)


def _delivery_row(seq: int, e: Envelope, now: int) -> Row:
    due_at = e.due_at or now + e.delay
    expires_at = due_at + e.retention if e.retention else 0
    in_line = e.ordering_key is not None
    return (seq, e.queue, e.claimed_as, due_at, expires_at, e.priority, e.gated_by, in_line, e.sequence)


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
    """Report the holder of the key; a dead letter is reopened if the sender wants that."""
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
        first = numbers_of(session, [envelopes[0].id])[envelopes[0].id]
        expires_at = now + round(limits.KEY_WINDOW * MICROSECONDS)
        _take_key(session, (keys.BATCH_SCOPE, batch_key, keys.BATCH, first, fingerprint, 1, expires_at))
    return answers
