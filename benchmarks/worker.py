"""One worker process: ``python -m benchmarks.worker STORE CONTENDER MODE URL BOARD SLOT``.

It says when it is connected, begins when it is told to, and ends when its standard input does.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from benchmarks.board import Tally
from benchmarks.contenders import make_contender
from benchmarks.loop import run

TRANSACTIONAL = "transactional"
PLAIN = "plain"


class _Strings:
    """The measuring process pulls them; when it dies, so does the worker."""

    def __init__(self) -> None:
        self._begin = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for _ in sys.stdin:
            self._begin.set()
        os._exit(0)

    def ready(self) -> None:
        print("ready", flush=True)
        self._begin.wait()


def main(store: str, name: str, mode: str, url: str, board: str, slot: str) -> None:
    strings = _Strings()
    contender = make_contender(store, name, transactional=mode == TRANSACTIONAL)
    run(contender.drain(url, Tally(Path(board), int(slot)), strings.ready))


if __name__ == "__main__":
    main(*sys.argv[1:])
