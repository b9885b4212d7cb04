"""Limits: each accepts its last value and not one more, and they agree with each other."""

from __future__ import annotations

import string
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onefold import limits
from onefold.errors import ConfigurationError, LimitError


def test_the_defaults_are_those_of_the_requirements() -> None:
    """The values promised in the documentation, in one place."""
    assert limits.ATTEMPTS_DEFAULT == 5
    assert (limits.RETRY_BASE, limits.RETRY_FACTOR, limits.RETRY_CAP) == (5, 2, 300)
    assert limits.LEASE == 30
    assert limits.LEASE / limits.RENEWALS_PER_LEASE == 10
    assert limits.MESSAGE_RETENTION == 7 * limits.DAY
    assert limits.DEAD_RETENTION == 14 * limits.DAY
    assert limits.DEDUPLICATION_WINDOW == 3_600
    assert (limits.CONCURRENCY, limits.CONCURRENCY_MAX) == (10, 1_000)
    assert limits.REDRIVE_MAX == 100


def test_a_key_outlives_the_message_its_time_as_a_dead_letter_and_two_days() -> None:
    """B10: 23 days with the defaults."""
    assert limits.KEY_WINDOW == limits.MESSAGE_RETENTION + limits.DEAD_RETENTION + 2 * limits.DAY == 23 * limits.DAY


def test_a_message_fits_into_the_strictest_engine_with_room_to_spare() -> None:
    """A13: Cloudflare allows 128,000 bytes and counts about 100 of its own."""
    assert limits.PAYLOAD_BYTES_MAX < limits.ENVELOPE_BYTES_MAX <= 128_000 - 100


@pytest.mark.parametrize("name", ["a", "0", "a.b_c-d", "z" * 63])
def test_a_name_of_plain_characters_is_accepted(name: str) -> None:
    """Fault 29."""
    assert limits.check_name("queue", name) == name


@pytest.mark.parametrize("name", ["", "A", "-a", ".a", "_a", "a b", "a\n", "a*", "a>", "a{b}", "z" * 64, "ü", None, 7])
def test_a_name_that_some_engine_could_misread_is_refused(name: Any) -> None:
    """Fault 29: the error says what is allowed."""
    with pytest.raises(ConfigurationError, match="1 to 63 characters"):
        limits.check_name("queue", name)


@given(st.text(max_size=70))
def test_no_name_outside_the_allowed_alphabet_passes(name: str) -> None:
    """Fault 29: for any text."""
    first, rest = string.ascii_lowercase + string.digits, string.ascii_lowercase + string.digits + "._-"
    legal = 0 < len(name) <= 63 and name[0] in first and all(c in rest for c in name)
    try:
        limits.check_name("task", name)
    except ConfigurationError:
        assert not legal
    else:
        assert legal


def test_text_is_measured_in_bytes() -> None:
    """A13: an emoji counts as four bytes."""
    assert limits.check_bytes("subject", "🙂" * 2, 8) == "🙂" * 2
    with pytest.raises(LimitError, match="has 12 bytes; 1 to 8"):
        limits.check_bytes("subject", "🙂" * 3, 8)


@pytest.mark.parametrize("text", ["", "\0", "a\r\nb", "\ud800", "\u202e", "\x7f", None, 7, b"x"])
def test_text_that_travels_badly_is_refused_with_its_field(text: Any) -> None:
    """Faults 26 and 29: empty, control and direction characters, lone surrogates, and values that are no text."""
    with pytest.raises(LimitError) as refused:
        limits.check_bytes("subject", text, 100)
    assert refused.value.field == "subject"


@pytest.mark.parametrize(
    ("value", "legal"), [(1, True), (5, True), (0.999, False), (5.001, False), (float("nan"), False)]
)
def test_a_range_includes_both_its_ends(value: float, legal: bool) -> None:
    """P3, Q2."""
    if legal:
        limits.check_range("lease", value, 1, 5)
    else:
        with pytest.raises(ConfigurationError, match=r"lease .* from 1 to 5"):
            limits.check_range("lease", value, 1, 5)
