"""A separate program that holds SQLite's write lock: ``python -m onefold.testing.chaos.lock FILE``.

For each number of seconds it reads from standard input, it holds the lock for that long and prints whether it got it.
It uses the interpreter's own SQLite, like other programs that people run on the same file.
"""

from __future__ import annotations

import asyncio
import sqlite3
import sys

from onefold.clock import SystemClock

#: Seconds it waits for the lock.
_WAIT_SECONDS = 5.0


def main() -> None:
    """Hold the lock for each duration read, until the input ends."""
    connection = sqlite3.connect(sys.argv[1], timeout=_WAIT_SECONDS, isolation_level=None)
    for line in sys.stdin:
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            print("busy", flush=True)
            continue
        asyncio.run(SystemClock().sleep(float(line)))
        connection.execute("ROLLBACK")
        print("held", flush=True)


if __name__ == "__main__":
    main()
