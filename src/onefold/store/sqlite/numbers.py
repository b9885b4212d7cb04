"""Numbers of messages: the integer under which the tables keep a message, made of its id.

The number is the beginning of the id, so messages lie in the order in which they were made and need no index of ids.
The id is stored whole and always compared, so that knowing a number is not knowing an id.
When the number of an id is taken, the message gets one of the next ``TRIES``; when those are taken too, as by hundreds
of processes whose clocks show the same millisecond, a digest of the id or one of the next numbers after it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from hashlib import blake2b

from onefold.errors import StoreError
from onefold.message.envelope import Envelope
from onefold.store import Fenced, State
from onefold.store.sqlite.session import TRIES, RowLease, Session, as_json

#: Numbers are below this, so that adding ``TRIES`` stays within SQLite's integers.
_NUMBERS = 2**63 - 1 - TRIES


def number_of(id_: str) -> int:
    """Return the number an id begins with.

    Of a UUID of version 7: its milliseconds (until the year 2248), the 12 bits after the version and 8 of those after
    the variant, so that numbers are in the order of the ids.  Other UUIDs are read in the same way; an id that is not
    a UUID has a digest for its number.
    """
    digits = id_.replace("-", "")
    try:
        if len(digits) == 32:
            bits = int(digits, 16)
            return (bits >> 80 << 20 | (bits >> 64 & 0xFFF) << 8 | bits >> 54 & 0xFF) % _NUMBERS
    except ValueError:
        pass
    return second_number_of(id_)


def second_number_of(id_: str) -> int:
    """Return the number for an id whose first number and all that follow it are taken."""
    return int.from_bytes(blake2b(id_.encode(errors="surrogatepass"), digest_size=8).digest()) % _NUMBERS


def numbers_of(session: Session, ids: Sequence[str]) -> dict[str, int]:
    """Return the numbers of those messages that are kept, by id."""
    wanted = set(ids)
    found: dict[str, int] = {}
    for number in (number_of, second_number_of):
        near = session.rows("near", as_json([number(id_) for id_ in wanted]))
        found.update({id_: seq for seq, id_ in near if id_ in wanted})
        wanted -= found.keys()
        if not wanted:
            break
    return found


def stored_number(session: Session, id_: str) -> int | None:
    """Return the number of one message, None if it is not kept."""
    return numbers_of(session, [id_]).get(id_)


def give_numbers(session: Session, envelopes: Sequence[Envelope]) -> tuple[list[int], dict[str, int]]:
    """Return a number for each message that is about to be put, and by id the numbers of those already kept."""
    first = [number_of(e.id) for e in envelopes]
    near = session.rows("near", as_json(first))
    if not near and len(set(first)) == len(first):
        return first, {}
    known = numbers_of(session, [e.id for e in envelopes])
    taken = {seq for seq, _ in near}
    given = dict(known)
    for e, number in zip(envelopes, first, strict=True):
        if e.id not in given:
            seq = _free(number, taken)
            if seq is None:
                second = second_number_of(e.id)
                taken.update(seq for seq, _ in session.rows("near", as_json([second])))
                seq = _free(second, taken)
            if seq is None:
                raise StoreError(
                    f"message {e.id} cannot be stored: the {2 * (TRIES + 1)} numbers that its id stands for are taken; "
                    "send it again, with a new id"
                )
            taken.add(seq)
            given[e.id] = seq
    return [given[e.id] for e in envelopes], known


def _free(number: int, taken: Collection[int]) -> int | None:
    return next((one for one in range(number, number + TRIES + 1) if one not in taken), None)


def rows_of(session: Session, leases: Sequence[Fenced]) -> list[int | None]:
    """Return the number of each lease's row, None where there is no such message any more."""
    unknown = [one.id for one in leases if not isinstance(one, RowLease)]
    found = numbers_of(session, unknown) if unknown else {}
    return [one.seq if isinstance(one, RowLease) else found.get(one.id) for one in leases]


def held_rows(session: Session, leases: Sequence[Fenced], *, leased: bool = False) -> list[int | None]:
    """Return the number of each lease's row, None where the fence is not that lease's any more.

    ``leased`` asks for those whose lease has not run out either.
    """
    numbers = rows_of(session, leases)
    asked = as_json([seq for seq in numbers if seq is not None])
    # With the id, because the number of a message that is gone may be another's by now.
    rows = {(seq, id_, fence): state for seq, id_, fence, state in session.rows("lease_fences", asked)}
    states = [rows.get((seq, one.id, one.fence)) for one, seq in zip(leases, numbers, strict=True)]
    return [
        None if state is None or (leased and state != State.LEASED) else seq
        for seq, state in zip(numbers, states, strict=True)
    ]
