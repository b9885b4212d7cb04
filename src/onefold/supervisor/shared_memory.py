"""The memory that a worker process shares with its supervisor, which can read it even when the process hangs or died.

It holds the messages that the process has begun; ``worker/slots.py`` has the protocol.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator

from onefold import limits
from onefold.child_process import unnamed_file
from onefold.worker.slots import Slot


class Board:
    """The shared memory of one worker process and its supervisor."""

    def __init__(self, descriptor: int, capacity: int) -> None:
        self.descriptor = descriptor
        self._capacity = capacity
        self._memory = mmap.mmap(descriptor, _size(capacity))
        self._words = memoryview(self._memory).cast("q")
        self._free: list[int] = []
        self._used = 0

    @classmethod
    def create(cls, capacity: int) -> Board:
        """Make the memory, which the kernel frees when the last process that has it ends."""
        descriptor = unnamed_file("onefold-board")
        try:
            os.ftruncate(descriptor, _size(capacity))
            return cls(descriptor, capacity)
        except BaseException:
            os.close(descriptor)
            raise

    def close(self) -> None:
        """Close the memory in this process; the other process still has it."""
        self._words.release()
        self._memory.close()
        os.close(self.descriptor)

    # written by the worker

    def start(self, message_id: str, fence: int, *, at: int, deadline: int) -> int:
        number = self._free.pop() if self._free else self._take_unused()
        key = message_id.encode()
        _SLOT.pack_into(self._memory, _HEADER_BYTES + number * _SLOT.size, key, len(key), at, deadline, fence, _RUNNING)
        return number

    def _take_unused(self) -> int:
        number = self._used
        if number == self._capacity:
            raise RuntimeError(f"more than {number} messages were begun and not settled")
        self._used = self._words[_USED] = number + 1
        return number

    def finish(self, number: int) -> None:
        self._words[_HEADER_WORDS + (number + 1) * _SLOT_WORDS - 1] = _FINISHED

    def clear(self, number: int) -> None:
        self._words[_HEADER_WORDS + (number + 1) * _SLOT_WORDS - 1] = _EMPTY
        self._free.append(number)

    def renewed(self, at: int) -> None:
        self._words[_RENEWED_AT] = at

    def count(self, settled: int) -> None:
        self._words[_SETTLED] = settled

    def beat(self, *, at: int, memory: int) -> None:
        """Write that the event loop moves, and how many bytes the process takes."""
        self._words[_MEMORY] = memory
        self._words[_BEAT] = at

    # read by the supervisor

    def slots(self) -> Iterator[Slot]:
        """Yield the messages that were begun and are not settled."""
        used = min(self._words[_USED], self._capacity)
        taken = self._memory[_HEADER_BYTES : _HEADER_BYTES + used * _SLOT.size]
        for key, length, started_at, deadline, fence, state in _SLOT.iter_unpack(taken):
            if state in (_RUNNING, _FINISHED):
                # An id that is read while it is written is the id of no message; reading it must not raise.
                yield Slot(key[:length].decode(errors="replace"), fence, started_at, deadline, state == _FINISHED)

    @property
    def beat_at(self) -> int:
        """When the event loop last moved, on the steady clock; 0 before the first beat."""
        return self._words[_BEAT]

    @property
    def renewed_at(self) -> int:
        """When every lease of the process was last known to be good, on the steady clock."""
        return self._words[_RENEWED_AT]

    @property
    def settled(self) -> int:
        """How many messages the process has settled."""
        return self._words[_SETTLED]

    @property
    def memory(self) -> int:
        """How many bytes of memory the process takes."""
        return self._words[_MEMORY]


def _size(capacity: int) -> int:
    return _HEADER_BYTES + capacity * _SLOT.size


#: A slot's last word, its state: empty, a handler that runs, or one that returned before its message is settled.
_EMPTY, _RUNNING, _FINISHED = 0, 1, 2
#: The id, its length, when the handler started, when its process must be killed (0: never), the fence, the state.
_SLOT = struct.Struct(f"={limits.ID_BYTES_MAX}sqqqqq")
#: The header, in words of eight bytes: beat, renewed_at, settled, memory, slots ever used, and three spare ones.
_HEADER_BYTES = 64
_BEAT, _RENEWED_AT, _SETTLED, _MEMORY, _USED = range(5)
_SLOT_WORDS = _SLOT.size // 8
_HEADER_WORDS = _HEADER_BYTES // 8
