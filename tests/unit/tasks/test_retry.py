"""The outcome of a failed run: pure decisions, checked against the tables of the requirements."""

from __future__ import annotations

import email.message
import random
import traceback
import urllib.error
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onefold import limits
from onefold.clock import MICROSECONDS, to_instant
from onefold.errors import (
    ConfigurationError,
    DecodeError,
    EnvelopeError,
    HandlerTimeoutError,
    KeyReuseError,
    LimitError,
    Reject,
    Retry,
    Snooze,
)
from onefold.message.envelope import Envelope
from onefold.store import Again, Dead, Lease
from onefold.tasks.failure_text import failure_of, status_of
from onefold.tasks.retry import DELAY_SECONDS_MIN, THROTTLED_SECONDS, RetryPolicy, decide, retry_after

NOW = to_instant(datetime(2030, 1, 1, tzinfo=UTC))


def lease(attempt: int = 1) -> Lease:
    envelope = Envelope(
        id="1", message_type="t", queue="q", idempotency_key="k", correlation_id="c", causation_id="c", subject="s"
    )
    return Lease(envelope, 1, attempt, 0, 0, NOW, "worker")


def decided(error: BaseException, *, attempt: int = 1, policy: RetryPolicy | None = None) -> Again | Dead:
    return decide(policy or RetryPolicy(), lease(attempt), error, now=NOW, chance=random.Random(1))


class Extreme(random.Random):
    """A source of chance that always returns the same extreme."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def random(self) -> float:
        return self.value


def test_the_delays_without_jitter_are_exactly_those_of_the_table() -> None:
    """C7: min(5·2^(n-1), 300) seconds."""
    policy = RetryPolicy(jitter=False, max_attempts=9)
    assert [policy.delay(n, random.Random()) for n in range(1, 9)] == [5, 10, 20, 40, 80, 160, 300, 300]


def test_fixed_delays_are_all_the_same() -> None:
    """C7: a fixed delay has no jitter."""
    policy = RetryPolicy(fixed=True, base=timedelta(seconds=7))
    assert {policy.delay(n, random.Random(n)) for n in range(1, 20)} == {7}


def test_jitter_lies_between_half_and_all_of_the_delay() -> None:
    """C8."""
    policy = RetryPolicy()
    for attempt, full in enumerate((5, 10, 20, 40, 80, 160, 300, 300), start=1):
        assert policy.delay(attempt, Extreme(0.0)) == full / 2
        assert full * 0.99 < policy.delay(attempt, Extreme(0.999)) < full
    assert len({policy.delay(1, chance) for chance in [random.Random(1)] for _ in range(50)}) == 50


def test_the_fast_policy_is_that_of_the_messaging_patterns() -> None:
    """C7, C8: 1 s doubling to 60 s with full jitter, but never zero."""
    policy = RetryPolicy.fast()
    assert [policy.delay(n, Extreme(1.0)) for n in range(1, 9)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert policy.delay(1, Extreme(0.0)) == DELAY_SECONDS_MIN


@given(
    st.floats(DELAY_SECONDS_MIN, 1e6),
    st.floats(1, 100),
    st.floats(DELAY_SECONDS_MIN, 1e6),
    st.floats(0, 1),
    st.booleans(),
    st.integers(1, 10_000),
    st.integers(),
)
def test_a_delay_is_never_above_its_cap_nor_below_the_minimum(
    base: float, factor: float, cap: float, floor: float, jitter: bool, attempt: int, seed: int
) -> None:
    """C7, C8: for every policy and every attempt, without overflow."""
    policy = RetryPolicy(base=base, factor=factor, cap=cap, jitter_floor=floor, jitter=jitter)
    assert DELAY_SECONDS_MIN <= policy.delay(attempt, random.Random(seed)) <= cap


@pytest.mark.parametrize(
    "settings",
    [
        {"max_attempts": 0},
        {"max_attempts": limits.ATTEMPTS_MAX + 1},
        {"base": 0},
        {"base": -1},
        {"base": timedelta(seconds=-1)},
        {"base": float("nan")},
        {"cap": float("inf")},
        {"cap": 0},
        {"factor": 0.5},
        {"factor": 101},
        {"jitter_floor": 1.1},
        {"jitter_floor": -0.1},
        {"permanent": ("ValueError",)},
        {"permanent": (7,)},
    ],
    ids=str,
)
def test_a_policy_outside_its_range_is_refused_when_it_is_made(settings: dict[str, Any]) -> None:
    """P3, Q2."""
    with pytest.raises(ConfigurationError):
        RetryPolicy(**settings)


def test_max_attempts_counts_all_runs() -> None:
    """C5, C6: five runs by default, counted from one."""
    outcomes = [decided(ValueError("no"), attempt=n) for n in range(1, 6)]
    assert [type(outcome) for outcome in outcomes] == [Again, Again, Again, Again, Dead]
    assert isinstance(outcomes[-1], Dead)
    assert outcomes[-1].failure.reason == "attempts exhausted"
    once = decided(ValueError("no"), policy=RetryPolicy(max_attempts=1))
    assert isinstance(once, Dead)


def test_an_unknown_exception_is_retried_and_written_down() -> None:
    """C9, D3: type, message and stack."""
    try:
        raise LookupError("unknown")
    except LookupError as error:
        outcome = decided(error)
    assert isinstance(outcome, Again)
    assert outcome.counted
    assert 2.5 <= outcome.delay <= 5
    assert outcome.failure is not None
    assert (outcome.failure.error_type, outcome.failure.error_message) == ("LookupError", "unknown")
    assert "test_an_unknown_exception_is_retried" in outcome.failure.stack


def _raised(depth: int) -> ValueError:
    try:
        _raise(depth)
    except ValueError as error:
        return error
    raise AssertionError


def _raise(depth: int) -> None:
    if depth:
        _raise(depth - 1)
    raise ValueError("here")


def test_a_stack_reads_as_python_writes_it() -> None:
    """D3: every frame with its line of source, the one that raised last, without marks under the lines."""
    error = _raised(2)
    frames = traceback.extract_tb(error.__traceback__)
    expected = "".join(f'  File "{f.filename}", line {f.lineno}, in {f.name}\n    {f.line}\n' for f in frames)
    assert failure_of(error, "failed").stack == expected
    assert expected.count("in _raise\n") == 3


def _refuse(*_: object) -> str:
    raise ValueError("no source")


@pytest.mark.parametrize(
    ("line_table", "names", "line"),
    [
        (None, {}, 8),
        (b"", {}, None),
        (None, {"__name__": "made", "__loader__": SimpleNamespace(get_source=_refuse)}, 8),
    ],
    ids=["made while it runs", "without lines", "with a loader that raises"],
)
def test_a_stack_whose_source_cannot_be_read_keeps_its_places(
    line_table: bytes | None, names: dict[str, object], line: int | None
) -> None:
    code = compile("\n" * 7 + "raise ValueError('made')", "made", "exec")
    with pytest.raises(ValueError, match="made") as caught:
        exec(code if line_table is None else code.replace(co_linetable=line_table), dict(names))
    assert failure_of(caught.value, "failed").stack.endswith(f'  File "made", line {line}, in <module>\n')


def test_a_stack_is_cut_where_it_is_furthest_from_the_error() -> None:
    def endless(number: int) -> int:
        return endless(number + 1) + 1

    with pytest.raises(RecursionError) as caught:
        endless(0)
    stack = failure_of(caught.value, "failed").stack
    assert len(stack) <= limits.STACK_TEXT_MAX
    assert "return endless(number + 1) + 1" in stack


def test_a_failure_of_our_own_keeps_its_stack() -> None:
    """Only the frames of onefold that called a handler are left out."""
    with pytest.raises(ConfigurationError) as caught:
        limits.check_step_name("step", "")
    called = caught.value.__traceback__
    assert called is not None
    for trace, files in ((called, 2), (called.tb_next, 1)):
        stack = failure_of(caught.value.with_traceback(trace), "failed").stack
        assert (stack.count("  File "), "in check_step_name" in stack) == (files, True)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (Reject("never"), "rejected"),
        (DecodeError("a", "no"), "contract"),
        (LimitError("result", "no"), "contract"),
        (EnvelopeError("a", "no"), "contract"),
        (KeyReuseError("t", "k", "1"), "key reuse"),
        (ZeroDivisionError(), "permanent"),
        (FileNotFoundError(), "permanent"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_that_a_retry_cannot_cure_is_dead_at_once(error: Exception, reason: str) -> None:
    """A14, C9: on the first attempt."""
    outcome = decided(error, policy=RetryPolicy(permanent=(ZeroDivisionError, OSError)))
    assert isinstance(outcome, Dead)
    assert outcome.failure.reason == reason


def test_retry_after_waits_as_long_as_the_handler_said_and_counts() -> None:
    """C5, C11."""
    outcome = decided(Retry(after=timedelta(minutes=2)))
    assert isinstance(outcome, Again)
    assert (outcome.delay, outcome.counted) == (120, True)
    usual = decided(Retry())
    assert isinstance(usual, Again)
    assert 2.5 <= usual.delay <= 5
    assert isinstance(decided(Retry(after=1), attempt=5), Dead)


def test_snooze_waits_without_counting_however_often() -> None:
    """C10: the wait has a minimum, so that it cannot spin."""
    outcome = decided(Snooze(after=30), attempt=1_000)
    assert isinstance(outcome, Again)
    assert (outcome.delay, outcome.counted, outcome.failure) == (30, False, None)
    spinning = decided(Snooze(after=0))
    assert isinstance(spinning, Again)
    assert spinning.delay == DELAY_SECONDS_MIN


def test_a_timeout_of_the_handler_is_an_ordinary_failure() -> None:
    """C9: network and timeouts are retryable."""
    assert isinstance(decided(HandlerTimeoutError("slow")), Again)
    assert isinstance(decided(TimeoutError()), Again)


class HttpxError(Exception):
    """An error like those of httpx and requests, with the status on the response."""

    def __init__(self, status: int, headers: dict[str, str] | None = None) -> None:
        super().__init__(f"status {status}")
        self.response = SimpleNamespace(status_code=status, headers=headers or {})


class AiohttpError(Exception):
    """An error like those of aiohttp, with the status on the exception."""

    def __init__(self, status: int, headers: dict[str, str] | None = None) -> None:
        super().__init__(f"status {status}")
        self.status = status
        self.headers = headers


def urllib_error(status: int, headers: dict[str, str] | None = None) -> urllib.error.HTTPError:
    message = email.message.Message()
    for name, value in (headers or {}).items():
        message[name] = value
    return urllib.error.HTTPError("http://localhost", status, "no", message, None)


CLIENTS = [HttpxError, AiohttpError, urllib_error]


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("status", range(400, 600))
def test_every_http_status_is_later_or_never(client: Any, status: int) -> None:
    """C9: 408, 425, 429 and 5xx are retried, every other 4xx is not."""
    error = client(status)
    outcome = decided(error)
    failure = outcome.failure
    assert failure is not None
    assert failure.status_code == status_of(error) == status
    if status >= 500 or status in (408, 425):
        assert isinstance(outcome, Again)
        assert outcome.counted
    elif status == 429:
        assert outcome == Again(THROTTLED_SECONDS, failure, counted=False)
    else:
        assert isinstance(outcome, Dead)
        assert failure.reason == "permanent"


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("header", ["Retry-After", "retry-after"])
def test_an_upstreams_retry_after_is_honoured_and_burns_no_attempt(client: Any, status: int, header: str) -> None:
    """C10: in seconds or as a date, however many attempts there were."""
    later = datetime(2030, 1, 1, 0, 2, tzinfo=UTC)
    for text in ("120", " 120 ", format_datetime(later, usegmt=True)):
        outcome = decided(client(status, {header: text}), attempt=99)
        assert isinstance(outcome, Again)
        assert (outcome.delay, outcome.counted) == (120, False)


def test_another_status_keeps_its_own_delay_whatever_it_asks() -> None:
    """C10: only 429 and 503 use their Retry-After header."""
    outcome = decided(HttpxError(500, {"Retry-After": "120"}))
    assert isinstance(outcome, Again)
    assert outcome.counted
    assert outcome.delay <= 5


@pytest.mark.parametrize(
    "text",
    ["", "soon", "-5", "1.5", "²", "٣x", "Wed, 99 Foo 2030", "Wed, 21 Oct 2015 07:28:00 -0000", "9" * 5_000, "\0"],
)
def test_a_nonsensical_retry_after_is_as_good_as_none(text: str) -> None:
    """C10: an upstream may write anything, and the worker goes on."""
    outcome = decided(HttpxError(429, {"Retry-After": text}))
    assert isinstance(outcome, Again)
    assert outcome.delay == THROTTLED_SECONDS


@pytest.mark.parametrize("text", ["99999999999", "9" * 300, "Fri, 31 Dec 9999 23:59:59 GMT"])
def test_an_endless_retry_after_is_shortened(text: str) -> None:
    """C10: the year 5000 would overflow the store's clock."""
    outcome = decided(HttpxError(503, {"Retry-After": text}))
    assert isinstance(outcome, Again)
    assert outcome.delay == limits.RETRY_AFTER_MAX


@pytest.mark.parametrize("text", ["0", "Tue, 01 Jan 2019 00:00:00 GMT"])
def test_a_retry_after_that_has_passed_does_not_spin(text: str) -> None:
    """C10: the retry waits at least the minimum."""
    outcome = decided(HttpxError(429, {"Retry-After": text}))
    assert isinstance(outcome, Again)
    assert outcome.delay == DELAY_SECONDS_MIN


@given(st.text(max_size=40) | st.integers(0, 10**400).map(str))
def test_any_retry_after_gives_a_bounded_wait(text: str) -> None:
    """C10: for every header."""
    asked = retry_after(HttpxError(429, {"Retry-After": text}), NOW)
    assert asked is None or 0 <= asked <= limits.RETRY_AFTER_MAX


class HostileError(Exception):
    """Raises when its attributes are read."""

    def __str__(self) -> str:
        raise RuntimeError("str")

    @property
    def response(self) -> Any:
        raise RuntimeError("response")

    @property
    def status(self) -> Any:
        raise RuntimeError("status")

    @property
    def headers(self) -> Any:
        raise RuntimeError("headers")


def test_an_exception_that_raises_when_looked_at_is_still_decided_about() -> None:
    """Fault 22: the worker goes on."""
    outcome = decided(HostileError())
    assert isinstance(outcome, Again)
    assert outcome.failure is not None
    assert outcome.failure.error_message == "(the exception cannot be printed)"


@pytest.mark.parametrize("status", ["404", 404.0, True, 7, 600, None])
def test_something_that_is_no_http_status_is_not_taken_for_one(status: Any) -> None:
    """C9: an exit code or an error number is no reason to give up."""
    error = ValueError("no")
    error.code = status  # type: ignore[attr-defined]
    assert status_of(error) is None
    assert isinstance(decided(error), Again)


def test_a_failure_is_bounded_and_can_be_stored_anywhere() -> None:
    """D3, fault 26: no NUL, no lone surrogates, no megabytes."""
    failure = failure_of(ValueError("\0\ud800" + "x" * 100_000), "failed")
    assert len(failure.error_message) == limits.ERROR_TEXT_MAX
    assert "\0" not in failure.error_message
    failure.error_message.encode()


def test_a_module_of_the_exception_is_part_of_its_type() -> None:
    """D3: except for built-in ones."""
    assert failure_of(urllib_error(404), "failed").error_type == "urllib.error.HTTPError"
    assert failure_of(ValueError(), "failed").error_type == "ValueError"


def test_delays_are_relative_to_the_clock_that_is_given() -> None:
    """C19: the decision does not read the machine's clock."""
    date = format_datetime(datetime(2030, 1, 1, 0, 1, tzinfo=UTC), usegmt=True)
    error = HttpxError(429, {"Retry-After": date})
    assert retry_after(error, NOW) == 60
    assert retry_after(error, NOW + 30 * MICROSECONDS) == 30
