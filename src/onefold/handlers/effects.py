"""Stage 7, handle: the effect ledger, for calls to the outside that must not be made twice.

Before such a call its intent is recorded, after it the outcome.  A crash in between leaves the effect *uncertain*:
it may or may not have happened, so it is not simply tried again.  A probe decides, or a provider that still
remembers our key makes a second call harmless, or the message is parked until a person has found out.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Generic, Literal, TypeVar, cast

from onefold import limits
from onefold.clock import MICROSECONDS, to_datetime
from onefold.errors import HandlerError, Reject, Retry, Snooze, UncertainError, seconds
from onefold.message.codec import ResultCodec, result_codec
from onefold.store import Act, Store
from onefold.store.journal_lines import Line, LineKind, encode

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Happened(Generic[R]):
    """A probe's answer: the effect happened, and ``value`` is what the call would have returned."""

    value: R


@dataclass(frozen=True, slots=True)
class NotHappened:
    """A probe's answer: the effect did not happen, so it may be tried."""


#: A probe: asks the provider whether an uncertain effect happened.  If it cannot tell, it raises and is called again
#: by the next run.
Reconcile = Callable[[], Awaitable[Happened[R] | NotHappened]]
Call = Callable[[], Awaitable[R]] | Callable[[], R]

Record = Callable[[Sequence[Line]], Awaitable[list[Line]]]
Load = Callable[[], Awaitable[Iterable[Line]]]

#: By raising one of these a call declares that it had no effect; after any other exception that is uncertain.
_NO_EFFECT = (Retry, Reject, Snooze)

_NOTHING = encode(None)


class Ledger:
    """The effects of one claimed message, or of one step of a run, whose name is then the ``prefix`` of their lines."""

    def __init__(self, message_id: str, load: Load, record: Record, prefix: str = "") -> None:
        self._message_id = message_id
        self._load = load
        self._record = record
        self._prefix = prefix
        self._lines: dict[tuple[str, LineKind], Line] = {}
        self._loaded = False
        self._used: set[str] = set()
        #: The exception by which the last call declared that it had no effect.  A call may make another one with
        #: ``once``: the inner one's exception passes through the outer call, of which it says nothing.
        self._no_effect: BaseException | None = None
        #: Set when a person must resolve an effect, even if the handler catches the exception.
        self.uncertain: UncertainError | None = None

    async def once(
        self, name: str, call: Call[R], reconcile: Reconcile[R] | None, keeps_keys_for: timedelta | float | None
    ) -> R:
        """See ``Context.once``."""
        line = self._prefix + limits.check_step_name("effect", name)
        if line in self._used:
            raise HandlerError(f"once({name!r}) was used before in this run; give each effect a name of its own")
        self._used.add(line)
        try:
            return await self._once(
                line, call, reconcile, None if keeps_keys_for is None else seconds(keeps_keys_for, "keeps_keys_for")
            )
        except BaseException:
            self._used.discard(line)  # the handler may catch this and call again, which finds the effect uncertain
            raise

    async def _once(self, line: str, call: Call[R], reconcile: Reconcile[R] | None, keeps_keys_for: float | None) -> R:
        codec = result_codec(call, most=limits.RESULT_BYTES_MAX)
        if not self._loaded:
            self._remember(await self._load())
            self._loaded = True
        if (known := self._lines.get((line, LineKind.EFFECT))) is not None:
            return cast(R, codec.decode(known.value))
        begun = await self._begin(line, reconcile, keeps_keys_for)
        if isinstance(begun, Happened):
            return cast(R, await self._finish(line, codec, begun.value))
        return cast(R, await self._call(line, codec, call, begun))

    async def _begin(
        self, line: str, reconcile: Reconcile[Any] | None, keeps_keys_for: float | None
    ) -> int | Happened[Any]:
        """Record an intent and return the number of its try; or return the probe's ``Happened``."""
        number = len(intents(line, self._lines))
        uncertain = open_tries(line, self._lines)
        if not uncertain:
            await self._write(_intent(line, number))
            return number
        if reconcile is None:
            return await self._begin_without_probe(line, number, uncertain[0], keeps_keys_for)
        answer = await reconcile()
        if isinstance(answer, Happened):
            return answer
        if not isinstance(answer, NotHappened):
            raise HandlerError(f"reconcile= of {line} answered {answer!r}; return Happened(value) or NotHappened()")
        # The probe was asked about the effect, so its answer holds for every try of it so far.
        await self._write(*(_void(one.name) for one in uncertain), _intent(line, number))
        return number

    async def _call(self, line: str, codec: ResultCodec, call: Call[Any], number: int) -> Any:
        try:
            value = call()
            if inspect.isawaitable(value):
                value = await value
        except _NO_EFFECT as error:
            if error is not self._no_effect:
                self._no_effect = error
                # It says nothing about an earlier try, which may have had its effect although its answer was lost.
                await self._write(_void(_try_line(line, number)))
            raise
        return await self._finish(line, codec, value)

    async def _finish(self, line: str, codec: ResultCodec, value: Any) -> Any:
        (recorded,) = await self._write(Line(line, LineKind.EFFECT, codec.encode(value)))
        return codec.decode(recorded.value)

    async def _write(self, *steps: Line) -> list[Line]:
        recorded = await self._record(steps)
        self._remember(recorded)
        return recorded

    def _remember(self, steps: Iterable[Line]) -> None:
        self._lines.update(((step.name, step.kind), step) for step in steps)

    async def _begin_without_probe(self, line: str, number: int, first: Line, keeps_keys_for: float | None) -> int:
        """Allow another call only while the provider is sure to remember our key from the first uncertain try."""
        why = "and there is no reconcile= to ask"
        if keeps_keys_for is not None:
            # The line is dated by the store's clock, which also dated the first try.
            (intent,) = await self._write(_intent(line, number))
            if intent.at - first.at < keeps_keys_for * MICROSECONDS:
                return number
            await self._write(_void(intent.name))
            why = f"and the provider may have forgotten its key, which it keeps for {keeps_keys_for:g} s"
        self.uncertain = UncertainError(self._message_id, line, why)
        raise self.uncertain


def _intent(line: str, number: int) -> Line:
    return Line(_try_line(line, number), LineKind.INTENT, _NOTHING)


def _void(name: str) -> Line:
    return Line(name, LineKind.VOID, _NOTHING)


def _try_line(line: str, number: int) -> str:
    return f"{line}!{number}"


def intents(line: str, lines: dict[tuple[str, LineKind], Line]) -> list[Line]:
    """Return the intents of an effect, one for each try, oldest first."""
    found: list[Line] = []
    while (step := lines.get((_try_line(line, len(found)), LineKind.INTENT))) is not None:
        found.append(step)
    return found


def open_tries(line: str, lines: dict[tuple[str, LineKind], Line]) -> list[Line]:
    """Return the intents of the tries that may have had their effect, oldest first: those that are not void."""
    return [one for one in intents(line, lines) if (one.name, LineKind.VOID) not in lines]


# for people


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One effect of a message, as ``app`` and the command line show it."""

    name: str
    state: Literal["done", "uncertain", "not done"]
    #: When it was last begun, and how often.
    began_at: datetime
    tries: int


def entries(steps: Iterable[Line]) -> list[LedgerEntry]:
    """Return the effects in a journal, in the order in which they were first begun."""
    lines = {(step.name, step.kind): step for step in steps}
    found: list[LedgerEntry] = []
    for name, kind in lines:
        if kind is not LineKind.INTENT or not name.endswith("!0"):
            continue
        line = name.removesuffix("!0")
        tries = intents(line, lines)
        state: Literal["done", "uncertain", "not done"] = "uncertain"
        if (line, LineKind.EFFECT) in lines:
            state = "done"
        elif not open_tries(line, lines):
            state = "not done"
        found.append(LedgerEntry(line, state, to_datetime(tries[-1].at), len(tries)))
    return found


async def resolve(store: Store, message_id: str, name: str, value: bytes | None, act: Act) -> bool:
    """Record that an uncertain effect happened with this value, or with None that it did not; see ``App.resolve``."""
    lines = {(step.name, step.kind): step for step in await store.steps(message_id)}
    found = [entry for entry in entries(lines.values()) if entry.name == name]
    if not found or found[0].state != "uncertain":
        return False
    if value is not None:
        answer = [Line(name, LineKind.EFFECT, value)]
    else:
        # The operator answers for the effect, so for every try of it so far.
        answer = [_void(one.name) for one in open_tries(name, lines)]
    async with store.transaction() as transaction:
        recorded = await transaction.record(message_id, answer, act=act)
    return [step.value for step in recorded] == [step.value for step in answer]
