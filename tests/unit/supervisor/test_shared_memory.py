"""The memory that a worker process and its supervisor share."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator

import pytest

from onefold import limits
from onefold.supervisor.shared_memory import Board
from onefold.worker.slots import Slot


@pytest.fixture
def boards() -> Iterator[tuple[Board, Board]]:
    """The same memory twice, as the worker and as the supervisor map it."""
    theirs = Board.create(4)
    ours = Board(os.dup(theirs.descriptor), 4)
    yield theirs, ours
    theirs.close()
    ours.close()


def test_what_is_begun_is_seen_until_it_is_settled(boards: tuple[Board, Board]) -> None:
    worker, supervisor = boards
    assert list(supervisor.slots()) == []
    first = worker.start("a", 7, at=100, deadline=0)
    second = worker.start("b", 2**40, at=101, deadline=500)
    assert list(supervisor.slots()) == [Slot("a", 7, 100, 0, False), Slot("b", 2**40, 101, 500, False)]
    worker.finish(first)
    assert [(slot.id, slot.finished) for slot in supervisor.slots()] == [("a", True), ("b", False)]
    worker.clear(first)
    assert [slot.id for slot in supervisor.slots()] == ["b"]
    worker.clear(second)
    assert list(supervisor.slots()) == []


def test_slots_are_reused_and_never_run_out_when_messages_settle(boards: tuple[Board, Board]) -> None:
    worker, supervisor = boards
    for number in range(100):
        slot = worker.start(f"m{number}", 1, at=number, deadline=0)
        assert [slot.id for slot in supervisor.slots()] == [f"m{number}"]
        worker.clear(slot)
    for number in range(4):
        worker.start(f"m{number}", 1, at=number, deadline=0)
    with pytest.raises(RuntimeError, match="more than 4"):
        worker.start("one too many", 1, at=0, deadline=0)


def test_the_longest_id_fits_and_is_read_whole(boards: tuple[Board, Board]) -> None:
    worker, supervisor = boards
    longest = "ä" * (limits.ID_BYTES_MAX // 2)
    worker.clear(worker.start("x" * limits.ID_BYTES_MAX, 1, at=0, deadline=0))
    worker.start("short", 1, at=0, deadline=0)
    worker.start(longest, 1, at=0, deadline=0)
    assert [slot.id for slot in supervisor.slots()] == ["short", longest]


def test_a_slot_that_is_half_written_is_an_empty_one(boards: tuple[Board, Board]) -> None:
    """A process killed at any byte of a slot has not started its message: the state is written last."""
    worker, supervisor = boards
    number = worker.start("torn", 3, at=1, deadline=2)
    memory = worker._memory
    whole = memory[:]
    worker.clear(number)
    cleared = memory[:]
    changed = [index for index in range(len(whole)) if whole[index] != cleared[index]]
    assert changed  # a slot is in use only because of its state
    size = struct.calcsize(f"={limits.ID_BYTES_MAX}sqqqqq")
    for written in range(size - 8):
        memory[64 : 64 + size] = bytes(size)
        memory[64 : 64 + written] = whole[64 : 64 + written]
        assert list(supervisor.slots()) == []


def test_what_is_said_of_the_whole_process(boards: tuple[Board, Board]) -> None:
    worker, supervisor = boards
    assert (supervisor.beat_at, supervisor.renewed_at, supervisor.settled, supervisor.memory) == (0, 0, 0, 0)
    worker.beat(at=5, memory=6)
    worker.renewed(7)
    worker.count(8)
    assert (supervisor.beat_at, supervisor.renewed_at, supervisor.settled, supervisor.memory) == (5, 7, 8, 6)
