"""Random numbers that are fetched in blocks are as good as others."""

from __future__ import annotations

import os
import threading
import uuid

from onefold.clock import Ids, SystemClock, system_random
from onefold.testing.clock import FakeClock


def test_numbers_have_the_bits_asked_for() -> None:
    chance = system_random()
    for bits in (1, 8, 32, 74, 128, 200):
        drawn = [chance.getrandbits(bits) for _ in range(2_000)]
        assert all(0 <= number < 2**bits for number in drawn)
        assert any(number >= 2 ** (bits - 1) for number in drawn)


def test_fractions_are_spread_from_nought_up_to_one() -> None:
    chance = system_random()
    drawn = [chance.random() for _ in range(4_000)]
    assert all(0 <= number < 1 for number in drawn)
    assert all(800 < sum(low <= number < low + 0.25 for number in drawn) < 1_200 for low in (0, 0.25, 0.5, 0.75))
    assert any(number * 2**52 % 1 for number in drawn), "the last bit of a float is drawn as well"


def test_no_id_is_made_twice_by_threads() -> None:
    ids = Ids(SystemClock(), system_random())
    made: list[list[str]] = [[] for _ in range(4)]

    def make(mine: list[str]) -> None:
        mine.extend(ids.make() for _ in range(5_000))

    threads = [threading.Thread(target=make, args=(mine,)) for mine in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({one for mine in made for one in mine}) == 20_000


def test_ids_are_of_version_7_and_sort_by_the_millisecond_they_were_made_in() -> None:
    clock = FakeClock()
    ids = Ids(clock, system_random())
    made = []
    for _ in range(600):
        made.append(uuid.UUID(ids.make()))
        clock.advance(0.001)
    assert {(one.version, one.variant) for one in made} == {(7, uuid.RFC_4122)}
    assert made == sorted(made)


def test_an_id_does_not_tell_the_next() -> None:
    """The ids of one process do not reveal those of other messages: each has 62 random bits of its own."""
    ids = Ids(FakeClock(), system_random())
    numbers = [uuid.UUID(ids.make()).int & (1 << 62) - 1 for _ in range(1_000)]
    for shift in (0, 8, 31):
        assert len({number >> shift for number in numbers}) == 1_000, f"without the last {shift} bits"
    for bit in range(62):
        assert 350 < sum(number >> bit & 1 for number in numbers) < 650, f"bit {bit}"


def test_ids_of_one_millisecond_sort_as_they_were_made() -> None:
    """So messages that are sent together are found in their order."""
    ids = Ids(FakeClock(), system_random())
    made = [ids.make() for _ in range(4_096)]
    assert made == sorted(made)


def test_a_forked_child_does_not_repeat_its_parent() -> None:
    """Fault 41: bytes fetched before a fork would be used twice."""
    chance = system_random()
    ids = Ids(FakeClock(), chance)
    ids.make()
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writes, f"{chance.getrandbits(64)} {ids.make()}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    number, id_ = os.read(reads, 100).decode().split()
    assert int(number) != chance.getrandbits(64)
    assert id_ != ids.make()
    os.close(reads)
    os.close(writes)
