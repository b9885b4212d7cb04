"""Programs that open a store's file beside the store: scenarios shared by the tests and their mutants."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from onefold import App, SecondLibraryError, StoreReplacedError

SENDS = 10

#: A program with another SQLite library than the store's: it opens the file, reads and closes it.
VISITOR = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1])
connection.execute("SELECT count(*) FROM onefold_inbox").fetchall()
connection.close()
"""

#: Prints the messages that another process finds, and the damage if there is any.
LOOK = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1])
print(connection.execute("SELECT count(*) FROM onefold_message").fetchone()[0])
print(connection.execute("PRAGMA integrity_check").fetchone()[0])
"""


def app_on(path: Path, **given: object) -> App:
    app = App(f"sqlite:///{path}", **given)  # type: ignore[arg-type]

    @app.task(key="{number}")
    async def ping(number: int) -> int:
        return number

    return app


def in_another_process(program: str, path: Path) -> list[str]:
    """Run a program on the file and return its output."""
    command = [sys.executable, "-c", program, str(path)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.split()


def second_app_then_visitor(path: Path) -> None:
    """Two apps of one process open one file and one closes it; then another process opens and closes it.

    The other process finds the file in use, so it leaves the log alone; messages accepted afterwards are visible to
    other processes although the app never closed the file.
    """

    async def main() -> None:
        async with app_on(path) as app:
            await app.tasks["ping"].send(0)
            async with app_on(path):
                pass
            in_another_process(VISITOR, path)
            assert f"{path.name}-wal" in os.listdir(path.parent), (
                "the visitor took itself for the last, and removed the log"
            )
            for number in range(1, SENDS):
                await app.tasks["ping"].send(number)
            assert in_another_process(LOOK, path) == [str(SENDS), "ok"]

    asyncio.run(main())


def sqlite3_beside_the_store(path: Path) -> None:
    """The interpreter's module opens the file of an open store in the same process, and is refused."""

    async def main() -> None:
        async with app_on(path) as app:
            await app.tasks["ping"].send(0)
            refused = look_with_sqlite3(path)
            for number in range(1, SENDS):
                await app.tasks["ping"].send(number)
            assert in_another_process(LOOK, path) == [str(SENDS), "ok"]
            assert str(path) in refused
            assert 'driver="sqlite3"' in refused

    asyncio.run(main())


def look_with_sqlite3(path: Path) -> str:
    """Read from the file as a web view or an ORM does, and return the reason if that was refused."""
    try:
        connection = sqlite3.connect(path)
    except SecondLibraryError as error:
        return str(error)
    connection.execute("SELECT count(*) FROM onefold_inbox").fetchall()
    connection.close()
    return ""


def move_away(path: Path) -> None:
    """Rename the file and its log."""
    for suffix in ("", "-wal", "-shm"):
        if (one := Path(f"{path}{suffix}")).exists():
            one.rename(f"{path}.old{suffix}")


def moved_file_accepts_nothing(path: Path, act: Callable[[Path], None] = move_away, driver: str = "apsw") -> None:
    """Another file, or none, has the name of the store's file: every call that commits reports it."""

    async def main() -> None:
        async with app_on(path, driver=driver) as app:
            await app.tasks["ping"].send(1)
            act(path)
            for _ in range(2):
                with pytest.raises(StoreReplacedError, match=r"shop\.db.* nothing more is accepted"):
                    await app.tasks["ping"].send(2)
            with pytest.raises(StoreReplacedError):
                await app.send_many(app.tasks["ping"].call(number) for number in range(3, 5))
            with pytest.raises(StoreReplacedError):
                await app.work(until_idle=True)

    asyncio.run(main())
