"""What handlers under limits have written down, and whether it keeps to the limits.

Each handler writes when it begins and when it ends, on the clock that all processes of a machine share; the handlers of
a killed process end when that does.  A worker claims a message before its handler begins, so what the store has
counted is seen here a little later.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

#: From a claim to the beginning of its handler on a busy machine; a lease of the scene is twice as long.
DELAY_SECONDS = 1.0
#: By so much less may one handler be late than another: what was claimed before a window begins in it.
LATE_SECONDS = 0.5
#: Windows in which the starts at a rate are counted.
WINDOWS_SECONDS = (0.5, 1.0, 3.0, 10.0)


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits that a worker was started with."""

    cap: int
    cap_each: int
    rate: int
    rate_each: int
    #: Of the rate of all keys together; of each key no token is saved up.
    burst: int


@dataclass(frozen=True, slots=True)
class Ran:
    """One run of a handler: ``fence`` tells it from other runs of the message."""

    task: str
    key: str
    number: int
    fence: int
    process: int
    began: float
    ended: float


@dataclass(frozen=True, slots=True)
class Lived:
    """When a process worked, and with which limits."""

    began: float
    ended: float
    limits: Limits


def read(folder: Path, lives: Mapping[int, Lived]) -> list[Ran]:
    """Return the runs of all processes in the order in which they began."""
    runs: list[Ran] = []
    for process, lived in lives.items():
        begun: dict[tuple[str, int, int], tuple[str, float]] = {}
        for line in (folder / f"{process}.jsonl").read_text().splitlines():
            what, task, key, number, fence, at = json.loads(line)
            if what == "began":
                begun[task, number, fence] = key, at
            else:
                key, began = begun.pop((task, number, fence))
                runs.append(Ran(task, key, number, fence, process, began, at))
        runs += [Ran(*one[:1], key, *one[1:], process, began, lived.ended) for one, (key, began) in begun.items()]
    return sorted(runs, key=lambda run: run.began)


def _by_key(runs: Iterable[Ran], task: str) -> Iterator[tuple[str, list[Ran]]]:
    found: dict[str, list[Ran]] = defaultdict(list)
    for run in runs:
        if run.task == task:
            found[run.key].append(run)
    yield from found.items()


def overtaken(runs: Iterable[Ran]) -> set[Ran]:
    """Return the runs during which, or before which, another run of the same message began with a higher fence.

    Their lease had run out: the store counts them no more, and their commits are refused.
    """
    last: dict[tuple[str, int], Ran] = {}
    found: set[Ran] = set()
    for run in sorted(runs, key=lambda run: run.fence):
        before = last.get((run.task, run.number))
        if before is not None and before.ended > run.began:
            found.add(before)
        last[run.task, run.number] = run
    return found


def over_the_cap(runs: list[Ran], task: str, lives: Mapping[int, Lived], *, each: bool) -> list[str]:
    """Return each beginning at which more ran than any worker that was alive then may let run."""
    stale, found = overtaken(runs), []
    for key, those in _by_key(runs, task) if each else [("", [run for run in runs if run.task == task])]:
        running: list[Ran] = []
        for run in (one for one in those if one not in stale):
            running = [one for one in running if one.ended > run.began] + [run]
            known = _known(lives, run.began - DELAY_SECONDS, run.began)
            most = max(one.cap_each if each else one.cap for one in known)
            if len(running) > most:
                found.append(f"{len(running)} {task} {key} run at {run.began:.3f}, with a cap of {most}: {running}")
    return found


def over_the_rate(runs: list[Ran], task: str, lives: Mapping[int, Lived], *, each: bool) -> list[str]:
    """Return each window with more starts than the rates of the workers that were alive then allow."""
    found = []
    for key, those in _by_key(runs, task) if each else [("", [run for run in runs if run.task == task])]:
        starts = [run.began for run in those]
        for seconds in WINDOWS_SECONDS:
            first = 0
            for last, at in enumerate(starts):
                while at - starts[first] > seconds:
                    first += 1
                known = _known(lives, starts[first] - DELAY_SECONDS, at)
                rate = max(one.rate_each if each else one.rate for one in known)
                most = (1 if each else max(one.burst for one in known)) + math.ceil(rate * (seconds + LATE_SECONDS))
                if last - first + 1 > most:
                    found.append(f"{last - first + 1} starts of {task} {key} in {seconds} s, and {most} are allowed")
    return found


def _known(lives: Mapping[int, Lived], since: float, until: float) -> list[Limits]:
    return [life.limits for life in lives.values() if life.began <= until and life.ended >= since]


def out_of_order(runs: list[Ran], task: str) -> list[str]:
    """Return each message of a line that began before the one before it had ended."""
    found = []
    for key, those in _by_key(runs, task):
        last: dict[int, Ran] = {}
        for run in those:
            if run.number not in last or last[run.number].fence < run.fence:
                last[run.number] = run
        for one, following in pairwise(last[number] for number in sorted(last)):
            if following.began < one.ended:
                found.append(f"{task} {key}: {following} began before {one} had ended")
    return found


def places_of(runs: list[Ran], task: str, key: str) -> list[int]:
    """Return at which places the messages of a key first began, among those of the task."""
    return [place for place, run in enumerate(_first_runs(runs, task)) if run.key == key]


def _first_runs(runs: list[Ran], task: str) -> list[Ran]:
    first: dict[int, Ran] = {}
    for run in runs:
        if run.task == task:
            first.setdefault(run.number, run)
    return list(first.values())
