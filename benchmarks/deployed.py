"""The app that ``onefold worker benchmarks.deployed:app`` works for, where a measure needs it as it is deployed.

URL, mode, and where to count come from the environment; every process makes a file of its own with its first message.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

from benchmarks.board import PREFIX, Tally, make_file
from benchmarks.contender import BOARDS, MESSAGES, MODE, Mode
from benchmarks.ours import declare


@functools.cache
def _tally() -> Tally:
    path = Path(os.environ[BOARDS]) / f"{PREFIX}{os.getpid()}"
    return Tally(make_file(path, int(os.environ[MESSAGES])))


def _count(seq: int, made_at: int) -> None:
    _tally().count(seq, made_at)


app, _ = declare(os.environ["ONEFOLD_URL"], Mode(os.environ[MODE]), _count)
