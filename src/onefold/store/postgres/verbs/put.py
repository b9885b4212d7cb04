"""Put: messages are stored, or what already has their keys is reported.

The common message costs one statement.
One whose key is taken, or which has a deduplication key, is judged with the rows of its keys locked: in rounds of
lock, read, decide and take, because a key that is not there yet cannot be locked, and another sender may be quicker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from onefold import limits
from onefold.clock import MICROSECONDS
from onefold.errors import KeyReuseError, StoreUnavailableError
from onefold.message.envelope import Envelope
from onefold.store import Act, PutOptions, State, Stored
from onefold.store.postgres.columns import columns_of, values_of
from onefold.store.postgres.session import Session
from onefold.store.postgres.verbs.move import move
from onefold.store.postgres.wire.arrays import Column, blobs, flags, ids, numbers, texts
from onefold.store.postgres.wire.wire import Speaker
from onefold.store.shared import duplicates as keys
from onefold.store.shared.duplicates import Holder, Verdict, judge, judge_deduplication

#: Messages in one statement: enough to forget what a statement costs, few enough for the server's working memory.
CHUNK = 1_000
#: A round is lost to another transaction only if that one won, so this many in a row are not bad luck.
_ROUNDS_MAX = 20

#: The act that is recorded when a sender reopens a dead letter.
_SENT_AGAIN = Act(actor="sender", reason="sent again with if_dead='redrive'")

#: Scope, key and kind: what a key's row is found by.
_Name = tuple[str, str, int]


class _Wanted(NamedTuple):
    """A key that a message is about to take, and from which holder."""

    name: _Name
    message_id: str
    fingerprint: bytes
    schema_version: int
    expires_at: int | None
    holder: str | None


async def store_fresh(wire: Speaker, now: int | None, envelopes: Sequence[Envelope], *, keyed: bool = True) -> set[str]:
    """Store messages together with their keys; return the ids of those whose key was taken.

    With ``keyed`` false the keys have been taken already.
    One chunk is one round trip, and one transaction if there is none around it.
    """
    taken: set[str] = set()
    if len(envelopes) == 1:
        (e,) = envelopes
        takes_key = keyed and e.keyed
        stored = await wire.rows("put_one", {**values_of(e), "takes_key": takes_key, "now": now})
        return {e.id} if takes_key and not stored else taken
    for start in range(0, len(envelopes), CHUNK):
        chunk = envelopes[start : start + CHUNK]
        given: dict[str, Any] = {**columns_of(chunk), "now": now}
        if not keyed:
            given["takes_key"] = flags([False] * len(chunk))
        taken.update(id_ for (id_,) in await wire.rows("put", given))
    return taken


async def put(session: Session, envelopes: Sequence[Envelope], options: PutOptions) -> list[Stored]:
    """Store messages inside one open transaction, and return what was found or made for each."""
    return await _Putter(session).put(envelopes, options)


async def put_contested(session: Session, envelopes: Sequence[Envelope]) -> list[Stored]:
    """Store messages that could not be stored at first: a key was taken, or must be judged."""
    answers = await _Putter(session).contest(list({e.id: e for e in envelopes}.values()), PutOptions())
    return [answers[e.id] for e in envelopes]


async def put_sends(session: Session, envelopes: Sequence[Envelope]) -> dict[str, str]:
    """Put what handlers sent and return under which id each is kept; a key that clashes fails its handler."""
    answers = await put(session, envelopes, PutOptions())
    for e, stored in zip(envelopes, answers, strict=True):
        if stored.clash:
            raise KeyReuseError(e.message_type, e.idempotency_key, stored.id)
    return {e.id: stored.id for e, stored in zip(envelopes, answers, strict=True)}


class _Putter:
    """Puts on one connection, inside one open transaction."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._wire = session.wire

    @property
    def _now(self) -> int | None:
        return self._session.now

    async def put(self, envelopes: Sequence[Envelope], options: PutOptions) -> list[Stored]:
        """Store messages and return what was found or made for each."""
        if options.batch_key is not None:
            return await self._put_batch(envelopes, options.batch_key)
        given = {e.id: e for e in envelopes}
        in_turn = keys.in_turn(given.values())
        simple = [e for e in given.values() if e.id not in in_turn]
        taken = await store_fresh(self._wire, self._now, simple) if simple else set()
        if not taken and len(simple) == len(envelopes):
            return [Stored(e.id, State.SCHEDULED) for e in envelopes]
        answers = {e.id: Stored(e.id, State.SCHEDULED) for e in simple if e.id not in taken}
        if waiting := [e for e in given.values() if e.id not in answers]:
            answers.update(await self.contest(waiting, options))
        return [answers[e.id] for e in envelopes]

    async def contest(self, waiting: Sequence[Envelope], options: PutOptions) -> dict[str, Stored]:
        """Store messages that have a key which is taken, or a deduplication key; return the answers by message."""
        answers: dict[str, Stored] = {}
        async with self._session.judging:
            # A message waits for one before it, of which there are as many, or lost a key to another transaction.
            for _ in range(len(waiting) + _ROUNDS_MAX):
                if not waiting:
                    return answers
                await self._round(waiting, options, answers)
                waiting = [e for e in waiting if e.id not in answers]
        raise StoreUnavailableError("too many senders of the same keys at once; try again")

    async def _round(self, waiting: Sequence[Envelope], options: PutOptions, answers: dict[str, Stored]) -> None:
        """Answer the messages that do not depend on one before them that has no answer yet."""
        holders, now = await self._holders({name for e in waiting for name in _names(e)})
        undecided: set[_Name] = set()
        free: list[tuple[Envelope, list[_Wanted]]] = []
        suppressed: list[_Name] = []
        for e in waiting:
            names = _names(e)
            if not undecided.isdisjoint(names):
                undecided.update(names)
                continue
            held, wanted = _decide(e, names, holders, now)
            if held is None:
                undecided.update(names)
                free.append((e, wanted))
                continue
            name, holder, verdict = held
            answer = await self._report(holder, verdict, options)
            if answer is None:
                undecided.update(names)
                continue
            if verdict is Verdict.DUPLICATE:
                suppressed.append(name)
            answers[e.id] = answer
            if holder.state is State.DEAD and answers[e.id].state is not State.DEAD:
                _reopen(holders, holder.message_id)
        for times, those in _by_number(suppressed):
            await self._wire.rows("count_suppressed", {**_named(those), "times": times})
        if free:
            await self._store_free(free, answers)

    async def _store_free(self, free: Sequence[tuple[Envelope, list[_Wanted]]], answers: dict[str, Stored]) -> None:
        """Take the keys, and store the messages that got all of theirs; other transactions took keys of the rest."""
        won = await self._take([one for _, wanted in free for one in wanted])
        mine = [e for e, wanted in free if _has_all(won, wanted)]
        if mine:
            await store_fresh(self._wire, self._now, mine, keyed=False)
            answers.update((e.id, Stored(e.id, State.SCHEDULED)) for e in mine)
        lost = [wanted for e, wanted in free if e.id not in answers]
        await self._drop([one for wanted in lost for one in wanted if (one.message_id, one.name[2]) in won])

    async def _report(self, holder: Holder, verdict: Verdict, options: PutOptions) -> Stored | None:
        """Return the holder of the key; a dead letter is reopened if the sender wants that.

        None when the letter was closed since the keys were read, so that its key may be free: it is judged again.
        """
        state = holder.state or State.SCHEDULED
        duplicate = verdict is Verdict.DUPLICATE
        if duplicate and options.if_dead == "redrive" and state is State.DEAD:
            if await move(self._session, [holder.message_id], State.SCHEDULED, _SENT_AGAIN):
                state = State.SCHEDULED
            else:
                # Reopened or closed by another, or dead for too long.
                rows = await self._wire.rows("lock", {"ids": ids([holder.message_id])})
                state = next((State(number) for _, number in rows), State.DISCARDED)
                if state is State.DISCARDED:
                    return None
        return Stored(holder.message_id, state, duplicate=duplicate, clash=verdict is Verdict.CLASH)

    async def _holders(self, names: Iterable[_Name]) -> tuple[dict[_Name, Holder], int]:
        """Lock the keys that exist, in their order, and return their holders and the time."""
        ordered = sorted(names)
        await self._wire.rows("key_lock", _named(ordered))
        rows = await self._wire.rows("key_holder", {**_named(ordered), "now": self._now})
        found = {name: _holder(row[1:]) for name, row in zip(ordered, rows, strict=True) if row[1] is not None}
        return found, rows[0][0]

    async def _take(self, wanted: Sequence[_Wanted]) -> set[tuple[str, int]]:
        """Take keys in their order; return message and kind of each that was won."""
        ordered = sorted(wanted, key=lambda one: one.name)
        won: set[tuple[str, int]] = set()
        new = [one for one in ordered if one.holder is None]
        if new:
            won.update((row[0], row[1]) for row in await self._wire.rows("put_key", _taking(new)))
        for one in ordered:
            if one.holder is not None:
                won.update((row[0], row[1]) for row in await self._wire.rows("take_key", _taking_one(one)))
        return won

    async def _drop(self, taken: Sequence[_Wanted]) -> None:
        for one in taken:
            await self._wire.rows("drop_key", _taking_one(one))

    async def _put_batch(self, envelopes: Sequence[Envelope], batch_key: str) -> list[Stored]:
        """All or nothing: every message is new, or every message is the one of the first time.

        The batch's own key is taken first, so that a second sender waits here until the first has committed.
        """
        fingerprint = keys.batch_fingerprint(envelopes)
        name = (keys.BATCH_SCOPE, batch_key, keys.BATCH)
        wanted = _Wanted(name, envelopes[0].id, fingerprint, 1, None, None)
        new = bool(await self._take([wanted]))
        holders, now = await self._holders([name])
        holder = None if new else holders.get(name)
        answers = await self.put(envelopes, PutOptions())
        if keys.judge_batch(batch_key, fingerprint, holder, answers, now) is Verdict.FREE:
            expires_at = now + round(limits.KEY_WINDOW * MICROSECONDS)
            taken_from = holder.message_id if holder else wanted.message_id
            await self._take([wanted._replace(expires_at=expires_at, holder=taken_from)])
        elif new:
            await self._drop([wanted])
        return answers


def _names(e: Envelope) -> list[_Name]:
    """Return the keys of a message, the one that decides first."""
    names = [(e.scope, e.idempotency_key, keys.IDEMPOTENCY)] if e.keyed else []
    if e.deduplication_key is not None:
        names.append((e.scope, e.deduplication_key, keys.DEDUPLICATION))
    return names


def _reopen(holders: dict[_Name, Holder], message_id: str) -> None:
    """A dead letter was redriven: it is alive for the messages that are judged next."""
    for name, holder in holders.items():
        if holder.message_id == message_id:
            holders[name] = msgspec.structs.replace(holder, state=State.SCHEDULED)


def _decide(
    e: Envelope, names: Sequence[_Name], holders: dict[_Name, Holder], now: int
) -> tuple[tuple[_Name, Holder, Verdict] | None, list[_Wanted]]:
    """Return the holder that is in the way of a message, or the keys it is to take."""
    wanted: list[_Wanted] = []
    for name in names:
        holder = holders.get(name)
        deduplicating = name[2] == keys.DEDUPLICATION
        if holder is not None:
            verdict = judge_deduplication(holder, e, now) if deduplicating else judge(holder, e, now)
            if verdict is not Verdict.FREE:
                return (name, holder, verdict), []
        expires_at = now + e.deduplicate_for if deduplicating else None
        taken_from = holder.message_id if holder else None
        wanted.append(_Wanted(name, e.id, e.fingerprint, e.schema_version, expires_at, taken_from))
    return None, wanted


def _has_all(won: set[tuple[str, int]], wanted: Iterable[_Wanted]) -> bool:
    return all((one.message_id, one.name[2]) in won for one in wanted)


def _holder(row: tuple[Any, ...]) -> Holder:
    message_id, fingerprint, version, expires_at, state, kept_until = row
    return Holder(message_id, fingerprint, version, expires_at, None if state is None else State(state), kept_until)


def _named(names: Sequence[_Name]) -> dict[str, Column]:
    return {
        "scopes": texts([name[0] for name in names]),
        "keys": texts([name[1] for name in names]),
        "kinds": numbers([name[2] for name in names]),
    }


def _taking(wanted: Sequence[_Wanted]) -> dict[str, Column]:
    return {
        **_named([one.name for one in wanted]),
        "ids": ids([one.message_id for one in wanted]),
        "fingerprints": blobs([one.fingerprint for one in wanted]),
        "versions": numbers([one.schema_version for one in wanted]),
        "expiries": numbers([one.expires_at for one in wanted]),
    }


def _taking_one(wanted: _Wanted) -> dict[str, Any]:
    scope, key, kind = wanted.name
    return {
        "scope": scope,
        "key": key,
        "kind": kind,
        "id": wanted.message_id,
        "fingerprint": wanted.fingerprint,
        "version": wanted.schema_version,
        "expires_at": wanted.expires_at,
        "holder": wanted.holder,
    }


def _by_number(names: Iterable[_Name]) -> list[tuple[int, list[_Name]]]:
    """Put together the keys that occur equally often."""
    groups: dict[int, list[_Name]] = {}
    for name, times in Counter(names).items():
        groups.setdefault(times, []).append(name)
    return list(groups.items())
