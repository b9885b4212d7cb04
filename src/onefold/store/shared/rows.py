"""Rows to records and back: the column order both stores share."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import msgspec

from onefold.clock import MICROSECONDS
from onefold.message.envelope import COLUMNS, PINNED, Envelope, pack_headers, unpack_headers
from onefold.store import Again, Attempt, Dead, Done, Failure, Lease, Parked, Progress, Query, Record, State

encode_failure = msgspec.json.Encoder().encode
_decode_failure = msgspec.json.Decoder(Failure).decode

#: The errors of reading a damaged value.
UNREADABLE = (UnicodeDecodeError, msgspec.DecodeError)
#: The column of the headers among those of ``message``.
_HEADERS = len(COLUMNS)


def read_failure(data: bytes) -> Failure:
    """Return a stored failure; one that cannot be read says so, instead of failing all that is read with it."""
    try:
        return _decode_failure(data)
    except UNREADABLE as error:
        text = f"what was kept of this failure cannot be read: {error}"
        return Failure(reason="unreadable", error_type=type(error).__name__, error_message=text)


def read_envelope(row: tuple[Any, ...]) -> tuple[Envelope, str]:
    """Return the envelope of a row, and what is wrong with it: then it is without its headers."""
    try:
        return envelope_of(row), ""
    except UNREADABLE as error:
        return envelope_of((*row[:_HEADERS], None, *row[_HEADERS + 1 :])), f"its headers cannot be read: {error}"


def read_reply_to(packed: bytes) -> str | None:
    """Return whose journal is told how a message ended; headers that cannot be read name none."""
    try:
        return unpack_headers(packed).get("reply_to")
    except UNREADABLE:
        return None


#: The columns of ``message`` in their order; the payload's is not named after its field, which says how it travels.
MESSAGE_COLUMNS = (*("payload" if name == "payload_inline" else name for name in COLUMNS), "headers")
_columns_of = attrgetter(*COLUMNS)
_CREATED_AT = COLUMNS.index("created_at")


def message_row(e: Envelope, created_at: int) -> tuple[Any, ...]:
    """Return the columns of ``message`` for one envelope."""
    row = _columns_of(e)
    return (*row[:_CREATED_AT], created_at, *row[_CREATED_AT + 1 :], pack_headers(e))


def envelope_of(row: tuple[Any, ...]) -> Envelope:
    """Return the envelope of a row that begins with the columns of ``message``, then due and expiry."""
    id_, type_, version, queue, key, correlation, causation, subject, created, retention, payload = row[:_HEADERS]
    packed, due, expires = row[_HEADERS : _HEADERS + 3]
    if packed is None or packed == PINNED:
        # By name, because building a mapping first takes six times as long, and this is done for every message.
        return Envelope(
            id=id_,
            message_type=type_,
            schema_version=version,
            queue=queue,
            idempotency_key=key,
            correlation_id=correlation,
            causation_id=causation,
            subject=subject,
            created_at=created,
            retention=retention,
            payload_inline=payload,
            due_at=due,
            expires_at=expires,
            pinned=packed is not None,
        )
    return Envelope(**dict(zip(COLUMNS, row, strict=False)), due_at=due, expires_at=expires, **unpack_headers(packed))


def lease_of(
    row: tuple[Any, ...], *, claimed_at: int, worker: str, gate: str | None = None, gap: bool = False
) -> Lease:
    """Return the lease of a row just claimed, whose fence column still shows the fence before the claim."""
    fence, attempt, crashes, replay_count, wake = row[14:19]
    envelope, damage = read_envelope(row)
    lease = Lease(envelope, fence + 1, attempt + 1, crashes, replay_count, claimed_at, worker, wake, gate, gap)
    return msgspec.structs.replace(lease, damage=damage) if damage else lease


def record_of(row: tuple[Any, ...]) -> Record:
    """Return the record of a row of one of the ``find`` statements."""
    fence, attempt, crashes, replay_count, state, worker, ended_at, kept_until, body_until, result, failure = row[14:25]
    envelope, _ = read_envelope(row)
    # The body is removed first; a letter whose body is gone cannot be redriven any more.
    redrivable = state == State.DEAD and envelope.payload_inline is not None
    return Record(
        envelope,
        State(state),
        fence,
        attempt,
        crashes,
        replay_count,
        worker,
        ended_at,
        kept_until,
        result,
        None if failure is None else read_failure(failure),
        suppressed=row[25] if len(row) > 25 else 0,
        redrive_until=body_until if redrivable else None,
    )


def allows(query: Query, record: Record) -> bool:
    """Whether a record fulfils every condition of a query, for those that were found by their ids."""
    envelope = record.envelope
    return (
        (query.states is None or record.state in query.states)
        and query.queue in (None, envelope.queue)
        and query.message_type in (None, envelope.message_type)
        and query.correlation_id in (None, envelope.correlation_id)
        and query.worker in (None, record.worker)
        and (query.crashes is None or (not record.state.ended and record.crashes >= query.crashes))
        and (envelope.pinned or not query.runs)
        and envelope.id > query.after
    )


def attempt_of(row: tuple[Any, ...]) -> Attempt:
    """Return one failed run."""
    attempt, fence, at, worker, failure, delay = row
    return Attempt(attempt, fence, at, worker, read_failure(failure), delay)


def progress_of(row: tuple[Any, ...]) -> Progress:
    """Return how far a message is from a row of ``progress``, which begins with its id."""
    _, message_type, fence, running, percent, message, at, beat_at = row
    return Progress(message_type, fence, bool(running), percent, message, at, beat_at)


def outcome_row(lease: Lease, outcome: Done | Dead, now: int) -> tuple[Any, ...]:
    """Return the columns of ``outcome`` for a message that ended."""
    done = isinstance(outcome, Done)
    kept_until = now + round(outcome.key_window * MICROSECONDS)
    body_until = now + round(outcome.body_retention * MICROSECONDS)
    return (
        lease.id,
        lease.envelope.queue,
        int(State.DONE if done else State.DEAD),
        lease.fence,
        # A run that succeeded is not a failed attempt, one that died of its last failure is.
        lease.attempt if isinstance(outcome, Dead) and outcome.ran else lease.attempt - 1,
        lease.crashes,
        lease.replay_count,
        now,
        kept_until,
        min(kept_until, body_until),
        outcome.result if isinstance(outcome, Done) else None,
        None if isinstance(outcome, Done) else encode_failure(outcome.failure),
    )


def attempt_row(lease: Lease, outcome: Again | Dead | Parked, now: int) -> tuple[Any, ...] | None:
    """Return the columns of ``attempt``, or None when nothing failed."""
    if outcome.failure is None:
        return None
    delay = None if isinstance(outcome, Dead) else outcome.delay
    return (lease.id, lease.fence, lease.attempt, now, lease.worker, encode_failure(outcome.failure), delay)
