"""Stage 8, decide: what a failed run means.  Pure: policy, attempt and error in, outcome out."""

from __future__ import annotations

import linecache
import os
import random
from dataclasses import dataclass, field
from datetime import timedelta
from email.utils import parsedate_to_datetime
from types import CodeType, TracebackType
from typing import Any

from msgspec.structs import replace

from onefold import limits
from onefold.clock import MICROSECONDS, to_instant
from onefold.errors import (
    ConfigurationError,
    EnvelopeError,
    KeyReuseError,
    Reject,
    Retry,
    SessionLostError,
    SignalError,
    Snooze,
    TransactionEndedError,
    seconds,
)
from onefold.store import Again, Dead, Failure, Lease

#: Even full jitter waits this long, so that a failing message cannot spin.
DELAY_SECONDS_MIN = 0.1
#: Wait this long when an upstream says "too many requests" without saying for how long.
THROTTLED_SECONDS = 30.0

#: HTTP statuses below 500 that say "later", not "never".
_LATER = {408, 425, 429}
#: Statuses whose Retry-After is an appointment, not a failure: no attempt is used up.
_APPOINTMENT = {429, 503}

#: What a driver of PostgreSQL puts between what went wrong and the values with which it did.
_DETAIL = "\nDETAIL:"
#: How the names of our own files begin.
_OURS = os.path.join(os.path.dirname(__file__), "")
#: Places of stacks whose lines are kept; code that is made while it runs could have any number of them.
_PLACES_MAX = 4_096
#: By code and instruction; the code is kept too, so that its id is not given to another.
_places: dict[tuple[int, int], tuple[str, CodeType]] = {}
#: Whole stacks that are kept, so that failures that are alike share one text: each may be long.
_STACKS_MAX = 128
#: By their places, one after the other; with their code, as above.
_stacks: dict[tuple[int, ...], tuple[str, list[CodeType]]] = {}

#: What is not an error of the handler's, and is decided about by what it is.
_INSTRUCTIONS = (Snooze, Reject, EnvelopeError, KeyReuseError, SignalError, TransactionEndedError)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often a message runs and how long it waits in between.

    The defaults wait 5, 10, 20, 40 seconds and so on up to 300, each shortened at random by up to half,
    so that what failed together does not come back together.
    ``jitter=False`` waits exactly as long; ``fixed=True`` waits ``base`` every time.
    """

    #: Runs in all, the first one included.
    max_attempts: int = limits.ATTEMPTS_DEFAULT
    base: timedelta | float = limits.RETRY_BASE
    factor: float = limits.RETRY_FACTOR
    cap: timedelta | float = limits.RETRY_CAP
    jitter: bool = True
    #: The shortest jittered delay, as a part of the full one.
    jitter_floor: float = 0.5
    fixed: bool = False
    #: Exceptions that a retry cannot cure.
    permanent: tuple[type[BaseException], ...] = ()
    _base: float = field(init=False, repr=False)
    _cap: float = field(init=False, repr=False)

    def __post_init__(self) -> None:
        limits.check_range("max_attempts", self.max_attempts, 1, limits.ATTEMPTS_MAX)
        limits.check_range("factor", self.factor, 1, 100)
        limits.check_range("jitter_floor", self.jitter_floor, 0, 1)
        object.__setattr__(self, "_base", seconds(self.base, "base"))
        object.__setattr__(self, "_cap", seconds(self.cap, "cap"))
        if self._base < DELAY_SECONDS_MIN:
            raise ConfigurationError(f"base is {self._base:g} s; it must be at least {DELAY_SECONDS_MIN} s")
        if self._cap < DELAY_SECONDS_MIN:
            raise ConfigurationError(f"cap is {self._cap:g} s; it must be at least {DELAY_SECONDS_MIN} s")
        for kind in self.permanent:
            if not (isinstance(kind, type) and issubclass(kind, BaseException)):
                raise ConfigurationError(f"permanent names {kind!r}, which is not an exception class")

    @classmethod
    def fast(cls) -> RetryPolicy:
        """Return a policy for quick work: 1 second, doubling up to 60, anywhere between nothing and all of it."""
        return cls(base=1.0, cap=60.0, jitter_floor=0.0)

    def delay(self, attempt: int, chance: random.Random) -> float:
        """Return the seconds to wait after this attempt failed; attempts count from 1."""
        # Beyond 2**60 the cap has long been reached, and a float would overflow further on.
        full = self._base if self.fixed else min(self._base * self.factor ** min(attempt - 1, 60), self._cap)
        if not self.jitter or self.fixed:
            return full
        return max(DELAY_SECONDS_MIN, full * (self.jitter_floor + (1 - self.jitter_floor) * chance.random()))


def failure_of(error: BaseException, reason: str) -> Failure:
    """Write down an exception, bounded; a hostile ``__str__`` cannot get in the way."""
    return _failure(error, reason, status_of(error))


def _failure(error: BaseException, reason: str, status: int | None) -> Failure:
    kind = type(error)
    return Failure(
        reason=reason,
        error_type=kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}",
        error_message=_text(error),
        stack=_stack(error.__traceback__),
        status_code=status,
    )


def _stack(trace: TracebackType | None) -> str:
    """Write down where it was raised, as Python does, without the marks under each line.

    Finding what to mark means parsing the source again, which would cost more than the rest of a failed run.
    """
    places: list[int] = []
    at = trace
    while at is not None:
        # The line is not asked for: to find it, Python counts through the function from its beginning.
        places.append(id(at.tb_frame.f_code))
        places.append(at.tb_lasti)
        at = at.tb_next
    key = tuple(places)
    known = _stacks.get(key)
    if known is None:
        if len(_stacks) >= _STACKS_MAX:
            _stacks.clear()
        known = _stacks[key] = _write_stack(trace)
    return known[0]


def _write_stack(trace: TracebackType | None) -> tuple[str, list[CodeType]]:
    """Return a stack as text, and its code.

    How onefold came to call the handler is left out: it is the same for all, and nothing of the handler's.
    """
    lines: list[str] = []
    codes: list[CodeType] = []
    ours = True
    while trace is not None:
        code = trace.tb_frame.f_code
        codes.append(code)
        if ours and not code.co_filename.startswith(_OURS):
            ours = False
            lines.clear()
        known = _places.get((id(code), trace.tb_lasti))
        lines.append(_describe(trace) if known is None else known[0])
        trace = trace.tb_next
    return "".join(lines)[-limits.STACK_TEXT_MAX :], codes


def _describe(trace: TracebackType) -> str:
    """Return the lines about one place of a stack, and keep them: what fails, fails in the same places."""
    code = trace.tb_frame.f_code
    text = linecache.getline(code.co_filename, trace.tb_lineno, trace.tb_frame.f_globals).strip()
    lines = f'  File "{code.co_filename}", line {trace.tb_lineno}, in {code.co_name}\n'
    if text:
        lines += f"    {text}\n"
    if len(_places) >= _PLACES_MAX:
        _places.clear()
    _places[id(code), trace.tb_lasti] = lines, code
    return lines


def _text(error: BaseException) -> str:
    try:
        text = str(error)
    except BaseException:  # it is the handler's code that runs here, and may raise anything
        return "(the exception cannot be printed)"
    if _DETAIL in text and _peek(error, "sqlstate") is not None:
        # Drivers of PostgreSQL add the values of the row.
        text = text.partition(_DETAIL)[0]
    if text.isascii() and "\0" not in text:
        return text[: limits.ERROR_TEXT_MAX]
    # NUL and lone surrogates cannot be stored as text everywhere.
    return text.encode("utf-8", "replace").decode().replace("\0", "�")[: limits.ERROR_TEXT_MAX]


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status an exception carries, as httpx, requests, aiohttp and urllib do it."""
    try:
        # Most exceptions have nothing of the kind, which is seen without a call for each name.
        response = getattr(error, "response", None)
        if response is getattr(error, "status_code", None) is getattr(error, "status", None) is None:
            status = getattr(error, "code", None)
            return status if type(status) is int and 100 <= status <= 599 else None
    except BaseException:
        response = _peek(error, "response")
    for holder in (error,) if response is None else (response, error):
        for name in ("status_code", "status", "code"):
            status = _peek(holder, name)
            if type(status) is int and 100 <= status <= 599:
                return status
    return None


def _peek(holder: object, name: str) -> Any:
    """Read an attribute of a foreign exception; one that raises, whatever it is, when it is looked at has none."""
    try:
        return getattr(holder, name, None)
    except BaseException:
        return None


def retry_after(error: BaseException, now: int) -> float | None:
    """Return the seconds an upstream asked to wait, from its ``Retry-After`` header."""
    for holder in (_peek(error, "response"), error):
        headers = _peek(holder, "headers")
        try:
            text = headers.get("Retry-After") or headers.get("retry-after")
        except Exception:
            continue
        if not isinstance(text, str):
            continue
        try:
            asked = float(int(text)) if text.strip().isdecimal() else _until(text, now)
        except Exception:
            continue  # an upstream may write anything here
        return min(max(0.0, asked), limits.RETRY_AFTER_MAX)
    return None


def _until(text: str, now: int) -> float:
    return (to_instant(parsedate_to_datetime(text)) - now) / MICROSECONDS


def decide(policy: RetryPolicy, lease: Lease, error: BaseException, *, now: int, chance: random.Random) -> Again | Dead:
    """Return what becomes of a message whose handler raised."""
    if isinstance(error, _INSTRUCTIONS):
        return _follow(error)
    status = status_of(error)
    if isinstance(error, policy.permanent):
        return Dead(_failure(error, "permanent", status))
    if status is not None:
        if status in _APPOINTMENT and (wait := _appointment(error, status, now)) is not None:
            return Again(wait, _failure(error, "throttled", status), counted=False)
        if 400 <= status < 500 and status not in _LATER:
            return Dead(_failure(error, "permanent", status))
    if lease.attempt >= policy.max_attempts:
        return Dead(_failure(error, "attempts exhausted", status))
    asked = error.after_seconds if isinstance(error, Retry) else None
    delay = policy.delay(lease.attempt, chance) if asked is None else max(DELAY_SECONDS_MIN, asked)
    return Again(delay, _failure(error, "failed", status))


def blame(lease: Lease, error: SessionLostError, quarantine_after: int, *, delay: float) -> Again | Dead:
    """Return what becomes of a message whose own statement was running when its database session ended.

    Mostly the server has restarted, so no attempt is used up.  But a statement may also end its session each time it
    runs, so it counts as a crash, and the message is quarantined as one that kills its process.
    """
    crashes = lease.crashes + 1
    if crashes >= quarantine_after:
        failure = failure_of(error, "quarantined")
        text = f"its session or its worker ended {crashes} times while it ran; at last: {failure.error_message}"
        return Dead(replace(failure, error_message=text), ran=False)
    return Again(delay, None, counted=False, crashed=True)


def _follow(error: BaseException) -> Again | Dead:
    """Return what becomes of a message whose handler said so, or that no handler can read or send."""
    if isinstance(error, Snooze):
        return Again(max(DELAY_SECONDS_MIN, error.after_seconds), None, counted=False)
    if isinstance(error, Reject):
        return Dead(failure_of(error, "rejected"))
    if isinstance(error, SignalError):
        return Dead(failure_of(error, "no such run"))
    return Dead(failure_of(error, "key reuse" if isinstance(error, KeyReuseError) else "contract"))


def _appointment(error: BaseException, status: int | None, now: int) -> float | None:
    """A 429 always means later; a 503 is an ordinary failure unless it says when to come back."""
    asked = retry_after(error, now)
    if asked is None:
        return THROTTLED_SECONDS if status == 429 else None
    return max(DELAY_SECONDS_MIN, asked)
