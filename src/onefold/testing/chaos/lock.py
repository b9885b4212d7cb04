"""Another program that keeps SQLite's write lock: ``python -m onefold.testing.chaos.lock FILE``.

It reads seconds from its standard input, holds the lock for so long, and answers with a line: whether it had it.
It uses the interpreter's own SQLite, as the programs do that people run beside onefold.
"""

from __future__ import annotations

import asyncio
import sqlite3
import sys

from onefold.clock import SystemClock

#: Seconds it waits for the lock itself.
_WAIT_SECONDS = 5.0


def main() -> None:
    """Hold the lock whenever told to, until there is nothing more to read."""
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
