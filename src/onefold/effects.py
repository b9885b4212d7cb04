"""Stage 7, handle: the effect ledger, for calls to the outside that are not to be made twice.

Before such a call its intent is recorded, after it the outcome.  Who dies in between leaves the effect *uncertain*:
it may or may not have happened.  Then it is not simply tried again.  A probe decides, or a provider that still
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
from onefold.codec import ResultCodec, result_codec
from onefold.errors import HandlerError, Reject, Retry, Snooze, UncertainError, seconds
from onefold.journal import encode
from onefold.step import Step, StepKind
from onefold.store import Act, Store

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Happened(Generic[R]):
    """A probe's answer: the effect happened, and this is what the call would have returned."""

    value: R


@dataclass(frozen=True, slots=True)
class NotHappened:
    """A probe's answer: the effect did not happen, so it may be tried."""


#: Asks the outside whether an uncertain effect happened.  When it cannot tell, it raises: it will be asked again.
Reconcile = Callable[[], Awaitable[Happened[R] | NotHappened]]
Call = Callable[[], Awaitable[R]] | Callable[[], R]

Record = Callable[[Sequence[Step]], Awaitable[list[Step]]]
Load = Callable[[], Awaitable[Iterable[Step]]]

#: Raised by a call, these say that it was not done; any other exception leaves that open.
NOT_DONE = (Retry, Reject, Snooze)

_NOTHING = encode(None)


class Ledger:
    """The effects of one claimed message, or of one step of a run.

    ``within`` comes before every name.
    """

    def __init__(self, message_id: str, load: Load, record: Record, within: str = "") -> None:
        self._message_id = message_id
        self._load = load
        self._record = record
        self._within = within
        self._lines: dict[tuple[str, StepKind], Step] = {}
        self._loaded = False
        self._used: set[str] = set()
        #: The exception by which the last call said that it did nothing: it speaks for that call, and for no other
        #: that it passes through on its way, because a call may make another one.
        self._said: BaseException | None = None
        #: Set when a person is needed, whatever the handler makes of the exception.
        self.uncertain: UncertainError | None = None

    async def once(
        self, name: str, call: Call[R], reconcile: Reconcile[R] | None, keeps_keys_for: timedelta | float | None
    ) -> R:
        """See ``Context.once``."""
        line = self._within + limits.check_step_name("effect", name)
        if line in self._used:
            raise HandlerError(f"once({name!r}) was used before in this run; give each effect a name of its own")
        self._used.add(line)
        try:
            return await self._once(line, call, reconcile, None if keeps_keys_for is None else seconds(keeps_keys_for))
        except BaseException:
            self._used.discard(line)  # a handler may ask again, and will find it uncertain
            raise

    async def _once(self, line: str, call: Call[R], reconcile: Reconcile[R] | None, keeps_keys_for: float | None) -> R:
        codec = result_codec(call, most=limits.RESULT_BYTES_MAX)
        if not self._loaded:
            self._take_in(await self._load())
            self._loaded = True
        if (known := self._lines.get((line, StepKind.EFFECT))) is not None:
            return cast(R, codec.decode(known.value))
        begun = await self._begin(line, reconcile, keeps_keys_for)
        if isinstance(begun, Happened):
            return cast(R, await self._finish(line, codec, begun.value))
        return cast(R, await self._call(line, codec, call, begun))

    async def _begin(
        self, line: str, reconcile: Reconcile[Any] | None, keeps_keys_for: float | None
    ) -> int | Happened[Any]:
        """Return the number of the try that may be made now, or what a probe found to have happened."""
        number = len(intents(line, self._lines))
        doubtful = open_tries(line, self._lines)
        if not doubtful:
            await self._write(_intent(line, number))
            return number
        if reconcile is None:
            return await self._try_blind(line, number, doubtful[0], keeps_keys_for)
        answer = await reconcile()
        if isinstance(answer, Happened):
            return answer
        if not isinstance(answer, NotHappened):
            raise HandlerError(f"reconcile= of {line} answered {answer!r}; return Happened(value) or NotHappened()")
        # The probe was asked about the effect, so its answer holds for every try of it so far.
        await self._write(*(_void(one.name) for one in doubtful), _intent(line, number))
        return number

    async def _call(self, line: str, codec: ResultCodec, call: Call[Any], number: int) -> Any:
        try:
            value = call()
            if inspect.isawaitable(value):
                value = await value
        except NOT_DONE as error:
            if error is not self._said:
                self._said = error
                # It says so of this call only: an earlier one whose answer was lost may still have had its effect.
                await self._write(_void(_try_line(line, number)))
            raise
        return await self._finish(line, codec, value)

    async def _finish(self, line: str, codec: ResultCodec, value: Any) -> Any:
        (stands,) = await self._write(Step(line, StepKind.EFFECT, codec.encode(value)))
        return codec.decode(stands.value)

    async def _write(self, *steps: Step) -> list[Step]:
        recorded = await self._record(steps)
        self._take_in(recorded)
        return recorded

    def _take_in(self, steps: Iterable[Step]) -> None:
        self._lines.update(((step.name, step.kind), step) for step in steps)

    async def _try_blind(self, line: str, number: int, first: Step, keeps_keys_for: float | None) -> int:
        """Allow another call only while the provider is sure to know our key from the first doubtful one."""
        why = "and there is no reconcile= to ask"
        if keeps_keys_for is not None:
            # The store says what time it is now, by the same clock that dated the first try.
            (intent,) = await self._write(_intent(line, number))
            if intent.at - first.at < keeps_keys_for * MICROSECONDS:
                return number
            await self._write(_void(intent.name))
            why = f"and the provider may have forgotten its key, which it keeps for {keeps_keys_for:g} s"
        self.uncertain = UncertainError(self._message_id, line, why)
        raise self.uncertain


def _intent(line: str, number: int) -> Step:
    return Step(_try_line(line, number), StepKind.INTENT, _NOTHING)


def _void(name: str) -> Step:
    return Step(name, StepKind.VOID, _NOTHING)


def _try_line(line: str, number: int) -> str:
    return f"{line}!{number}"


def intents(line: str, lines: dict[tuple[str, StepKind], Step]) -> list[Step]:
    """Return how often an effect was begun, oldest first."""
    found: list[Step] = []
    while (step := lines.get((_try_line(line, len(found)), StepKind.INTENT))) is not None:
        found.append(step)
    return found


def open_tries(line: str, lines: dict[tuple[str, StepKind], Step]) -> list[Step]:
    """Return the tries of an effect that may have had it, oldest first: those of which nothing is known."""
    return [one for one in intents(line, lines) if (one.name, StepKind.VOID) not in lines]


# for people


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One effect of a message as people see it."""

    name: str
    state: Literal["done", "uncertain", "not done"]
    #: When it was last begun, and how often.
    began_at: datetime
    tries: int


def entries(steps: Iterable[Step]) -> list[LedgerEntry]:
    """Return the effects in a journal, in the order in which they were first begun."""
    lines = {(step.name, step.kind): step for step in steps}
    found: list[LedgerEntry] = []
    for name, kind in lines:
        if kind is not StepKind.INTENT or not name.endswith("!0"):
            continue
        line = name.removesuffix("!0")
        tries = intents(line, lines)
        state: Literal["done", "uncertain", "not done"] = "uncertain"
        if (line, StepKind.EFFECT) in lines:
            state = "done"
        elif not open_tries(line, lines):
            state = "not done"
        found.append(LedgerEntry(line, state, to_datetime(tries[-1].at), len(tries)))
    return found


async def resolve(store: Store, message_id: str, name: str, value: bytes | None, act: Act) -> bool:
    """Say that an uncertain effect happened with this value, or with None that it did not; see ``App.resolve``."""
    lines = {(step.name, step.kind): step for step in await store.steps(message_id)}
    found = [entry for entry in entries(lines.values()) if entry.name == name]
    if not found or found[0].state != "uncertain":
        return False
    if value is not None:
        told = [Step(name, StepKind.EFFECT, value)]
    else:
        # The person was asked about the effect, so the answer holds for every try of it so far.
        told = [_void(one.name) for one in open_tries(name, lines)]
    async with store.transaction() as transaction:
        stands = await transaction.record(message_id, told, act=act)
    return [step.value for step in stands] == [step.value for step in told]
