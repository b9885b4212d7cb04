"""What the journal of limits must notice, and what it must not."""

from __future__ import annotations

from limit_journal import Limits, Lived, Ran, out_of_order, over_the_cap, over_the_rate, overtaken

LIMITS = Limits(cap=2, cap_each=1, rate=2, rate_each=1, burst=1)
MORE = Limits(cap=3, cap_each=2, rate=20, rate_each=10, burst=1)
LIVES = {1: Lived(0.0, 100.0, LIMITS), 2: Lived(0.0, 10.0, MORE)}


def ran(number: int, began: float, ended: float, *, key: str = "a", fence: int = 2) -> Ran:
    return Ran("task", key, number, fence, 1, began, ended)


def test_one_more_than_the_cap_is_noticed() -> None:
    two = [ran(1, 50.0, 51.0), ran(2, 50.1, 51.0, key="b")]
    assert not over_the_cap(two, "task", LIVES, each=False)
    assert over_the_cap([*two, ran(3, 50.2, 51.0, key="c")], "task", LIVES, each=False)
    assert not over_the_cap([*two, ran(3, 51.0, 52.0, key="c")], "task", LIVES, each=False)


def test_one_more_than_the_cap_of_a_key_is_noticed() -> None:
    assert not over_the_cap([ran(1, 50.0, 51.0), ran(2, 50.1, 51.0, key="b")], "task", LIVES, each=True)
    assert over_the_cap([ran(1, 50.0, 51.0), ran(2, 50.1, 51.0)], "task", LIVES, each=True)


def test_the_largest_cap_counts_while_a_process_knows_it() -> None:
    three = [ran(n, 1.0 + n / 10, 5.0) for n in range(3)]
    assert not over_the_cap(three, "task", LIVES, each=False)
    later = [ran(n, 50.0 + n / 10, 60.0) for n in range(3)]
    assert over_the_cap(later, "task", LIVES, each=False)


def test_a_run_whose_lease_was_taken_over_is_not_counted() -> None:
    zombie, other = ran(1, 50.0, 55.0), ran(2, 50.1, 55.0)
    again = ran(1, 53.0, 54.0, fence=3)
    assert overtaken([zombie, other, again]) == {zombie}
    assert not over_the_cap([zombie, other, again], "task", LIVES, each=False)


def test_a_burst_above_the_rate_is_noticed() -> None:
    spread = [ran(n, 50.0 + n / 2, 50.0 + n / 2) for n in range(20)]
    assert not over_the_rate(spread, "task", LIVES, each=False)
    assert over_the_rate([ran(n, 50.0 + n / 10, 50.0 + n / 10) for n in range(20)], "task", LIVES, each=False)


def test_a_message_that_passes_the_one_before_it_is_noticed() -> None:
    assert not out_of_order([ran(1, 1.0, 2.0), ran(2, 2.0, 3.0), ran(1, 1.0, 2.0, key="b")], "task")
    assert out_of_order([ran(1, 1.0, 2.0), ran(2, 1.5, 3.0)], "task")
    assert out_of_order([ran(2, 1.0, 1.5), ran(1, 2.0, 3.0)], "task")


def test_the_first_run_of_a_message_that_was_taken_over_does_not_count_for_the_order() -> None:
    late = [ran(1, 1.0, 9.0), ran(1, 4.0, 5.0, fence=3), ran(2, 5.0, 6.0)]
    assert not out_of_order(late, "task")
