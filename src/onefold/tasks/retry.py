"""Stage 8, decide: the outcome of a failed run, from policy, attempt and error, without I/O."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from datetime import timedelta
from email.utils import parsedate_to_datetime

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
from onefold.store import Again, Dead, Lease
from onefold.tasks.failure_text import failure_of, peek, status_of

#: The shortest delay, also with full jitter, so that a failing message does not run in a loop.
DELAY_SECONDS_MIN = 0.1
#: The delay after "too many requests" without a Retry-After.
THROTTLED_SECONDS = 30.0

#: HTTP statuses below 500 for which a retry may help.
_LATER = {408, 425, 429}
#: Statuses with which a Retry-After uses up no attempt: the upstream asked to wait.
_APPOINTMENT = {429, 503}


#: Instructions, and errors with an outcome of their own whatever the policy.
_INSTRUCTIONS = (Snooze, Reject, EnvelopeError, KeyReuseError, SignalError, TransactionEndedError)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often a message runs and how long it waits in between.

    The defaults wait 5, 10, 20, 40 seconds and so on up to 300, each shortened at random by up to half,
    so that messages that failed together are not retried together.
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
    #: Exceptions after which a retry cannot help.
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
        # Far beyond 2**60 a float would overflow; the cap is reached long before.
        full = self._base if self.fixed else min(self._base * self.factor ** min(attempt - 1, 60), self._cap)
        if not self.jitter or self.fixed:
            return full
        return max(DELAY_SECONDS_MIN, full * (self.jitter_floor + (1 - self.jitter_floor) * chance.random()))


def retry_after(error: BaseException, now: int) -> float | None:
    """Return the seconds an upstream asked to wait, from its ``Retry-After`` header."""
    for holder in (peek(error, "response"), error):
        headers = peek(holder, "headers")
        try:
            text = headers.get("Retry-After") or headers.get("retry-after")
        except Exception:
            continue
        if not isinstance(text, str):
            continue
        try:
            asked = float(int(text)) if text.strip().isdecimal() else _until(text, now)
        except Exception:
            continue  # the header may hold anything
        return min(max(0.0, asked), limits.RETRY_AFTER_MAX)
    return None


def _until(text: str, now: int) -> float:
    return (to_instant(parsedate_to_datetime(text)) - now) / MICROSECONDS


def decide(policy: RetryPolicy, lease: Lease, error: BaseException, *, now: int, chance: random.Random) -> Again | Dead:
    """Return the outcome of a message after its handler raised."""
    if isinstance(error, _INSTRUCTIONS):
        return _follow(error)
    status = status_of(error)
    if isinstance(error, policy.permanent):
        return Dead(failure_of(error, "permanent"))
    if status is not None:
        if status in _APPOINTMENT and (wait := _appointment(error, status, now)) is not None:
            return Again(wait, failure_of(error, "throttled"), counted=False)
        if 400 <= status < 500 and status not in _LATER:
            return Dead(failure_of(error, "permanent"))
    if lease.attempt >= policy.max_attempts:
        return Dead(failure_of(error, "attempts exhausted"))
    asked = error.after_seconds if isinstance(error, Retry) else None
    delay = policy.delay(lease.attempt, chance) if asked is None else max(DELAY_SECONDS_MIN, asked)
    return Again(delay, failure_of(error, "failed"))


def blame(lease: Lease, error: SessionLostError, quarantine_after: int, *, delay: float) -> Again | Dead:
    """Return the outcome of a message after its database session ended during a statement of its own.

    Mostly the server has restarted, so no attempt is used up.  But a statement may also end its session each time it
    runs, so it counts as a crash, and the message is quarantined like one that kills its process.
    """
    crashes = lease.crashes + 1
    if crashes >= quarantine_after:
        failure = failure_of(error, "quarantined")
        text = f"its session or its worker ended {crashes} times while it ran; at last: {failure.error_message}"
        return Dead(replace(failure, error_message=text), ran=False)
    return Again(delay, None, counted=False, crashed=True)


def _follow(error: BaseException) -> Again | Dead:
    """Return the outcome for an instruction or an error in ``_INSTRUCTIONS``."""
    if isinstance(error, Snooze):
        return Again(max(DELAY_SECONDS_MIN, error.after_seconds), None, counted=False)
    if isinstance(error, Reject):
        return Dead(failure_of(error, "rejected"))
    if isinstance(error, SignalError):
        return Dead(failure_of(error, "no such run"))
    return Dead(failure_of(error, "key reuse" if isinstance(error, KeyReuseError) else "contract"))


def _appointment(error: BaseException, status: int | None, now: int) -> float | None:
    """Return the delay that the upstream asked for; None for a 503 without Retry-After, an ordinary failure."""
    asked = retry_after(error, now)
    if asked is None:
        return THROTTLED_SECONDS if status == 429 else None
    return max(DELAY_SECONDS_MIN, asked)
