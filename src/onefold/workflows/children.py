"""Stage 7, handle: the children of a run: messages whose ends are recorded in its journal."""

from __future__ import annotations

from collections.abc import Awaitable, Generator, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from onefold import limits
from onefold.clock import MICROSECONDS
from onefold.errors import CancelledMessageError, KeyReuseError
from onefold.message.envelope import Envelope
from onefold.store import Ended, Failure, Query, State
from onefold.store.journal_lines import Line, LineKind, answer_line, encode
from onefold.tasks.receipt import dead_error
from onefold.tasks.task import Call
from onefold.transactions.buffer import put_and_record
from onefold.workflows.journal import Sent, decode_ended, decode_sent
from onefold.workflows.replay import Raised, Replay, Wait, step_error, with_stored_ids

R = TypeVar("R")


class Child(Awaitable[R], Generic[R]):
    """A child, which is sent and waited for when this object is awaited or gathered."""

    def __init__(
        self,
        children: Children,
        name: str,
        call: Call[R],
        timeout: float | None = None,
        begun: Line | None = None,
        since: int = 0,
    ) -> None:
        self._children = children
        self.name = name
        self.call = call
        #: Seconds after which the run stops waiting for it, counted from the send.
        self.timeout = timeout
        #: In a saga, the line that is recorded when it is sent.
        self.begun = begun
        #: The timeout is counted from here if that is later: an operator resumed the saga after the send.
        self.since = since

    def __await__(self) -> Generator[Any, None, R]:
        return self._result().__await__()

    async def _result(self) -> R:
        (answer,) = await self._children.results([self])
        if isinstance(answer, Raised):
            raise answer.error
        result: R = answer
        return result


class Children:
    """Sends the children of one run and reads from its journal how they ended."""

    def __init__(self, replay: Replay) -> None:
        self._replay = replay
        self._journal = replay.journal

    async def results(self, children: Sequence[Child[Any]], place: str | None = None) -> list[Any]:
        """Wait until all children have ended, and return their results, or ``Raised`` errors.

        ``place`` is the branch in which failures are raised, if not the present one.
        """
        if unsent := [one for one in children if self._sent(one) is None]:
            await self._start(unsent)
        if foreign := self._foreign(children):
            await self._record_ends(foreign)
            foreign = self._foreign(children)
        ends = [self._end(one) for one in children]
        missing = [one for one, end in zip(children, ends, strict=True) if end is None]
        if missing:
            times = [self._next_look(foreign), *(self._deadline(one) for one in missing)]
            until = min((time for time in times if time is not None), default=None)
            await self._replay.wait(Wait(until, awaits=len(missing) - len(foreign)))
        return [self._outcome(one, end, place) for one, end in zip(children, ends, strict=True) if end is not None]

    def _foreign(self, children: Sequence[Child[Any]]) -> list[tuple[str, Child[Any]]]:
        """Return, with their ids, the children still waited for that another caller had sent: they do not report."""
        sent = ((self._sent(one), one) for one in children)
        return [(was.id, one) for was, one in sent if was and was.foreign and self._end(one) is None]

    def _next_look(self, foreign: Sequence[tuple[str, Child[Any]]]) -> int | None:
        """Return when to look again for children that do not report: the longer they take, the less often."""
        if not foreign:
            return None
        now = self._replay.now
        sent = [self._journal.find(child.name, LineKind.SENT) for _, child in foreign]
        waited = max(now - line.at for line in sent if line is not None)
        return now + max(round(limits.FOREIGN_CHILD_SECONDS * MICROSECONDS), waited // 10)

    def _answer_line(self, child: Child[Any]) -> str:
        return answer_line(child.name, self._journal.restarts)

    def _deadline(self, child: Child[Any]) -> int | None:
        """Return until when to wait for a child that has not ended, counted from its send."""
        if child.timeout is None:
            return None
        sent = self._journal.find(child.name, LineKind.SENT)
        return max(self._replay.now if sent is None else sent.at, child.since) + round(child.timeout * MICROSECONDS)

    def _sent(self, child: Child[Any]) -> Sent | None:
        with self._replay.noting_fatal():
            return self._journal.sent(child.name, child.call.fingerprint)

    async def _start(self, children: Sequence[Child[Any]]) -> None:
        """Send children with the next record; those with a key now, to learn whether another message holds it."""
        journal, keyed = self._journal, list[tuple[Child[Any], Envelope]]()
        for child in children:
            self._replay.begin(child.name)
            envelope, _ = self._replay.prepare(child.name, child.call)
            envelope = msgspec.structs.replace(envelope, reply_to=f"{self._replay.lease.id}/{self._answer_line(child)}")
            if child.call.key is not None or envelope.deduplication_key is not None:
                keyed.append((child, envelope))
                continue
            journal.pending += _sent_lines(child, Sent(envelope.id, role="child"))
            journal.sends.append(envelope)
        if keyed:
            await self._start_keyed(keyed)

    async def _start_keyed(self, keyed: Sequence[tuple[Child[Any], Envelope]]) -> None:
        replay, lines = self._replay, list[Line]()
        store = replay.environment.store
        async with replay.committing_pending() as (pending, sends, notes), store.transaction() as transaction:
            stored = await transaction.put([envelope for _, envelope in keyed])
            for (child, envelope), one in zip(keyed, stored, strict=True):
                if one.clash:
                    raise KeyReuseError(envelope.message_type, envelope.idempotency_key, one.id)
                lines += _sent_lines(child, Sent(one.id, one.id != envelope.id, "child"))
            pending_stored = await put_and_record(transaction, sends, notes)
            recorded = await transaction.record(
                replay.lease, with_stored_ids([*pending, *lines], sends, pending_stored)
            )
        self._journal.confirm(sends, pending_stored)
        self._journal.add(recorded)

    async def _record_ends(self, foreign: Sequence[tuple[str, Child[Any]]]) -> None:
        """Look up and record the ends of children that do not report to this run."""
        ids = tuple({id_ for id_, _ in foreign})
        found = await self._replay.environment.store.find(Query(ids=ids, limit=len(ids)))
        ended = {
            one.envelope.id: Ended(one.envelope.id, one.state, msgspec.Raw(one.result or b"null"), one.failure)
            for one in found
            if one.state.ended
        }
        lines = [
            Line(self._answer_line(child), LineKind.CHILD, encode(ended[id_])) for id_, child in foreign if id_ in ended
        ]
        if lines:
            await self._replay.record(lines)

    def _end(self, child: Child[Any]) -> Ended | None:
        """Return a child's end: the failure raised in the code, or its present end; a timeout is an end too."""
        if (failed := self._journal.find(child.name, LineKind.FAILED)) is not None:
            return decode_ended(failed.value)
        sent = self._journal.find(child.name, LineKind.SENT)
        ended = self._journal.ended(child.name)
        if ended is not None or child.timeout is None or sent is None:
            return ended
        if self._replay.now < max(sent.at, child.since) + round(child.timeout * MICROSECONDS):
            return None
        text = f"it did not end within {child.timeout:g} s of being sent; raise its timeout="
        failure = Failure(reason="timed out", error_type="HandlerTimeoutError", error_message=text)
        return Ended(decode_sent(sent.value).id, State.SCHEDULED, failure=failure)

    def _outcome(self, child: Child[Any], end: Ended, place: str | None) -> Any:
        if end.state is State.DONE:
            return child.call.task.signature.decode_result(bytes(end.result))
        if self._journal.find(child.name, LineKind.FAILED) is None:
            # Recorded so that every replay raises it, even if the child is redriven and succeeds later.
            line = self._journal.verdict_line(child.name)
            self._journal.pending.append(Line(line, LineKind.FAILED, encode(end), child.call.fingerprint))
        return Raised(self._replay.note_failure(child.name, _error(child, end), place))


def _error(child: Child[Any], end: Ended) -> Exception:
    if end.failure is not None and not end.state.ended:
        return step_error(child.name, end.failure)
    if end.state is State.DEAD and end.failure is not None:
        return dead_error(end.id, end.failure)
    return CancelledMessageError(f"child {end.id} was {end.state.name.lower()}; it has no result")


def _sent_lines(child: Child[Any], sent: Sent) -> list[Line]:
    line = Line(child.name, LineKind.SENT, encode(sent), child.call.fingerprint)
    return [line] if child.begun is None else [child.begun, line]
