"""Stage 7, handle: the children of a run, which are messages that report their end into its journal."""

from __future__ import annotations

from collections.abc import Awaitable, Generator, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from onefold import limits
from onefold.clock import MICROSECONDS
from onefold.envelope import Envelope
from onefold.errors import CancelledMessageError, KeyReuseError
from onefold.journal import Sent, decode_ended, decode_sent, encode
from onefold.receipt import dead_error
from onefold.step import Step, StepKind, answer_line
from onefold.store import Ended, Failure, Query, State
from onefold.stretch import Raised, Stretch, Wait, leave, step_error
from onefold.task import Call

R = TypeVar("R")


class Child(Awaitable[R], Generic[R]):
    """A child that is sent, and waited for, when it is awaited or gathered."""

    def __init__(
        self, children: Children, name: str, call: Call[R], timeout: float | None = None, begun: Step | None = None
    ) -> None:
        self._children = children
        self.name = name
        self.call = call
        #: How many seconds from its being sent it may take, as far as the run is concerned.
        self.timeout = timeout
        #: What is written down with its being sent, in a saga.
        self.begun = begun

    def __await__(self) -> Generator[Any, None, R]:
        return self._result().__await__()

    async def _result(self) -> R:
        (answer,) = await self._children.results([self])
        if isinstance(answer, Raised):
            raise answer.error
        result: R = answer
        return result


class Children:
    """Sends the children of one run, and knows how they ended."""

    def __init__(self, stretch: Stretch) -> None:
        self._stretch = stretch
        self._journal = stretch.journal

    async def results(self, children: Sequence[Child[Any]], place: str | None = None) -> list[Any]:
        """Return what each child returned, or the exception it ended with; wait until all have ended.

        ``place`` is the branch in which the code is told of failures, if not the present one.
        """
        if unsent := [one for one in children if self._sent(one) is None]:
            await self._start(unsent)
        if foreign := self._foreign(children):
            await self._look_for(foreign)
            foreign = self._foreign(children)
        ends = [self._end(one) for one in children]
        missing = [one for one, end in zip(children, ends, strict=True) if end is None]
        if missing:
            times = [self._next_look(foreign), *(self._deadline(one) for one in missing)]
            until = min((time for time in times if time is not None), default=None)
            await self._stretch.wait(Wait(until, awaits=len(missing) - len(foreign)))
        return [self._outcome(one, end, place) for one, end in zip(children, ends, strict=True) if end is not None]

    def _foreign(self, children: Sequence[Child[Any]]) -> list[tuple[str, Child[Any]]]:
        """Return those still waited for that somebody else had sent before, with their ids: they do not report."""
        sent = ((self._sent(one), one) for one in children)
        return [(was.id, one) for was, one in sent if was and was.foreign and self._end(one) is None]

    def _next_look(self, foreign: Sequence[tuple[str, Child[Any]]]) -> int | None:
        """Return when to look again for those that do not report: the longer it takes, the less often."""
        if not foreign:
            return None
        now = self._stretch.now
        sent = [self._journal.find(child.name, StepKind.SENT) for _, child in foreign]
        waited = max(now - line.at for line in sent if line is not None)
        return now + max(round(limits.FOREIGN_CHILD_SECONDS * MICROSECONDS), waited // 10)

    def _answer_line(self, child: Child[Any]) -> str:
        return answer_line(child.name, self._journal.restarts)

    def _deadline(self, child: Child[Any]) -> int | None:
        """Return until when to wait for a child that has not ended: counted from its being sent."""
        if child.timeout is None:
            return None
        sent = self._journal.find(child.name, StepKind.SENT)
        return (self._stretch.now if sent is None else sent.at) + round(child.timeout * MICROSECONDS)

    def _sent(self, child: Child[Any]) -> Sent | None:
        with self._stretch.fatal:
            return self._journal.sent(child.name, child.call.fingerprint)

    async def _start(self, children: Sequence[Child[Any]]) -> None:
        """Send children: with the next record, or where a key may be somebody else's, now, to be told so."""
        journal, keyed = self._journal, list[tuple[Child[Any], Envelope]]()
        for child in children:
            self._stretch.begin(child.name)
            envelope, _ = self._stretch.prepare(child.name, child.call)
            envelope = msgspec.structs.replace(
                envelope, reply_to=f"{self._stretch.lease.id}/{self._answer_line(child)}"
            )
            if child.call.key is not None or envelope.deduplication_key is not None:
                keyed.append((child, envelope))
                continue
            journal.pending += _sent_lines(child, Sent(envelope.id, role="child"))
            journal.sends.append(envelope)
        if keyed:
            await self._start_keyed(keyed)

    async def _start_keyed(self, keyed: Sequence[tuple[Child[Any], Envelope]]) -> None:
        stretch, lines = self._stretch, list[Step]()
        async with stretch.leaving() as (pending, sends, notes), stretch.tools.store.transaction() as transaction:
            stored = await transaction.put([envelope for _, envelope in keyed])
            for (child, envelope), one in zip(keyed, stored, strict=True):
                if one.clash:
                    raise KeyReuseError(envelope.message_type, envelope.idempotency_key, one.id)
                lines += _sent_lines(child, Sent(one.id, one.id != envelope.id, "child"))
            recorded = await transaction.record(stretch.lease, [*pending, *lines])
            await leave(transaction, sends, notes)
        self._journal.add(recorded)

    async def _look_for(self, foreign: Sequence[tuple[str, Child[Any]]]) -> None:
        """Ask how those children ended that do not report to this run."""
        ids = tuple({id_ for id_, _ in foreign})
        found = await self._stretch.tools.store.find(Query(ids=ids, limit=len(ids)))
        ended = {
            one.envelope.id: Ended(one.envelope.id, one.state, msgspec.Raw(one.result or b"null"), one.failure)
            for one in found
            if one.state.ended
        }
        lines = [
            Step(self._answer_line(child), StepKind.CHILD, encode(ended[id_])) for id_, child in foreign if id_ in ended
        ]
        if lines:
            await self._stretch.record(lines)

    def _end(self, child: Child[Any]) -> Ended | None:
        """Return how a child ended: as the code has dealt with it, or as it stands now; silence is an end too."""
        if (dealt_with := self._journal.find(child.name, StepKind.FAILED)) is not None:
            return decode_ended(dealt_with.value)
        sent = self._journal.find(child.name, StepKind.SENT)
        ended = self._journal.ended(child.name)
        if ended is not None or child.timeout is None or sent is None:
            return ended
        if self._stretch.now < sent.at + round(child.timeout * MICROSECONDS):
            return None
        text = f"it was not answered within {child.timeout:g} s of being sent"
        failure = Failure(reason="timed out", error_type="HandlerTimeoutError", error_message=text)
        return Ended(decode_sent(sent.value).id, State.SCHEDULED, failure=failure)

    def _outcome(self, child: Child[Any], end: Ended, place: str | None) -> Any:
        if end.state is State.DONE:
            return child.call.task.signature.decode_result(bytes(end.result))
        if self._journal.find(child.name, StepKind.FAILED) is None:
            # What the code makes of a failure stays true, even if the child is redriven and succeeds later.
            line = self._journal.verdict_line(child.name)
            self._journal.pending.append(Step(line, StepKind.FAILED, encode(end), child.call.fingerprint))
        return Raised(self._stretch.failing(child.name, _error(child, end), place))


def _error(child: Child[Any], end: Ended) -> Exception:
    if end.failure is not None and not end.state.ended:
        return step_error(child.name, end.failure)
    if end.state is State.DEAD and end.failure is not None:
        return dead_error(end.id, end.failure)
    return CancelledMessageError(f"child {end.id} was {end.state.name.lower()}; it has no result")


def _sent_lines(child: Child[Any], sent: Sent) -> list[Step]:
    line = Step(child.name, StepKind.SENT, encode(sent), child.call.fingerprint)
    return [line] if child.begun is None else [child.begun, line]
