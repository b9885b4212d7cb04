"""Reports of workers to the process that measures them, through shared memory: a log would cost more than the job.

Each worker has a file: a header of eight numbers, of which the first two are used (the start of its first handler and
the number of runs), then a record per run (the message's number, and the nanoseconds since it was made).
Processes that cannot map memory write the same bytes with ordinary writes.
"""

from __future__ import annotations

import mmap
import shutil
import threading
import time
from pathlib import Path

#: The prefix of the files' names.
PREFIX = "worker-"
#: Numbers before the first record; a full cache line.
HEADER = 8
_STARTED, _RAN = 0, 1
_RECORD = 2
_BYTES = 8


def _map(path: Path) -> memoryview:
    with path.open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 0)).cast("q")


def make_file(path: Path, messages: int) -> Path:
    """Make a worker's file with room for that many runs; it gets its name only when it has its size."""
    unfinished = path.with_name(f"new-{path.name}")
    with unfinished.open("wb") as file:
        file.truncate((HEADER + _RECORD * messages) * _BYTES)
    return unfinished.rename(path)


class Tally:
    """One worker's side."""

    def __init__(self, path: Path) -> None:
        self._numbers = _map(path)
        self._room = (len(self._numbers) - HEADER) // _RECORD
        # Some peers run their handlers in threads.
        self._lock = threading.Lock()

    def count(self, seq: int, made_at: int) -> None:
        """The handler's only work."""
        now = time.perf_counter_ns()
        numbers = self._numbers
        with self._lock:
            ran = numbers[_RAN]
            if not ran:
                numbers[_STARTED] = now
            if ran < self._room:
                at = HEADER + ran * _RECORD
                numbers[at] = seq
                numbers[at + 1] = now - made_at
            numbers[_RAN] = ran + 1


class Board:
    """The measuring side: the files of all workers, including those that start later."""

    def __init__(self, directory: Path, workers: int, messages: int) -> None:
        self.directory = directory / "boards"
        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir()
        self.paths = [make_file(self.directory / f"{PREFIX}{slot}", messages) for slot in range(workers)]
        self._maps: dict[Path, memoryview] = {}

    def _views(self) -> list[memoryview]:
        for path in self.directory.glob(f"{PREFIX}*"):
            if path not in self._maps:
                self._maps[path] = _map(path)
        return list(self._maps.values())

    @property
    def ran(self) -> int:
        return sum(view[_RAN] for view in self._views())

    @property
    def started(self) -> int:
        """The start of the very first handler; all processes of a machine share the clock."""
        return min(view[_STARTED] for view in self._views() if view[_RAN])

    def waits(self) -> dict[int, int]:
        """Return, by message that ran, the nanoseconds until its handler started."""
        return dict(record for view in self._views() for record in _records(view))

    def check(self, messages: int) -> None:
        """Refuse a measure in which a message did not run, or ran twice."""
        seen = len(self.waits())
        if seen != messages or self.ran != messages:
            raise RuntimeError(f"{self.ran} runs of {seen} messages instead of {messages}")


def _records(view: memoryview) -> list[tuple[int, int]]:
    end = min(HEADER + view[_RAN] * _RECORD, len(view))
    numbers = view[HEADER:end].tolist()
    return list(zip(numbers[::_RECORD], numbers[1::_RECORD], strict=True))
