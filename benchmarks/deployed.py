"""The app for ``onefold worker benchmarks.deployed:app``, for measures of a worker as it is deployed.

URL, mode and the place of the board come from the environment; each process makes its file with its first message.
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
