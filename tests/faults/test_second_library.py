"""A second SQLite library, a closed descriptor or another file in place of the store's: refused, or noticed."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import apsw
import pytest
from sqlite_visitors import (
    SENDS,
    app_on,
    move_away,
    moved_file_accepts_nothing,
    second_app_then_visitor,
    sqlite3_beside_the_store,
)

from onefold import App, ConfigurationError, SecondLibraryError, StoreReplacedError
from onefold.store import Query
from onefold.store.sqlite import second_library as guard

REMEDY = r'driver="sqlite3"'


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "shop.db"


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(60):
            await main()

    asyncio.run(within())


# the locks of this process


def test_a_second_app_on_the_file_does_not_drop_the_locks_of_the_first(path: Path) -> None:
    """The file is opened only through SQLite: closing any other descriptor would drop the process's locks."""
    second_app_then_visitor(path)


def test_opening_a_store_opens_the_file_through_sqlite_alone(path: Path) -> None:
    """Python opens no descriptor on an existing file, whichever way the store is opened."""
    run(lambda: _open_and_close(path))
    opened: list[str] = []
    watching = True

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if watching and event == "open" and isinstance(arguments[0], str | os.PathLike):
            opened.append(os.fspath(arguments[0]))

    sys.addaudithook(watch)
    run(lambda: _open_and_close(path))
    watching = False
    # Created with O_EXCL, which fails on an existing file without opening it.
    assert opened.count(str(path)) <= 1


async def _open_and_close(path: Path) -> None:
    async with app_on(path):
        pass


# the interpreter's module beside a store on apsw


def test_sqlite3_on_the_file_of_an_open_store_is_refused(path: Path) -> None:
    """Unaware of the other library, it would delete the log on closing, and accepted messages with it."""
    sqlite3_beside_the_store(path)


def spellings(path: Path) -> list[Any]:
    link = path.with_name("link.db")
    link.symlink_to(path)
    hard = path.with_name("hard.db")
    hard.hardlink_to(path)
    return [
        str(path),
        path,
        os.fsencode(path),
        os.path.relpath(path),
        f"{path.parent}/../{path.parent.name}/{path.name}",
        link,
        hard,
        f"file:{path}",
        f"file:{path}?mode=ro",
        f"file://{path}?immutable=1",
        f"file://localhost{path}",
        f"file:{path.parent}/%73hop.db",
    ]


def test_every_spelling_of_its_name_is_refused(path: Path) -> None:
    """Files are compared by device and inode: links, URIs and other spellings of the path lead to the same file."""

    async def main() -> None:
        async with app_on(path):
            for spelling in spellings(path):
                with pytest.raises(SecondLibraryError, match=REMEDY):
                    sqlite3.connect(spelling, uri=str(spelling).startswith("file:"))

    run(main)


def test_other_files_may_be_opened_and_the_file_itself_after_the_close(path: Path) -> None:
    """The guard refuses only the store's own file, while it is open."""

    async def main() -> None:
        async with app_on(path):
            for free in (path.with_name("other.db"), ":memory:", "", "file::memory:?cache=shared"):
                sqlite3.connect(free, uri=True).close()
            with pytest.raises(TypeError):
                sqlite3.connect(object())  # type: ignore[call-overload]
        connection = sqlite3.connect(path)
        assert connection.execute("SELECT count(*) FROM onefold_inbox").fetchone() == (0,)
        connection.close()

    run(main)


def test_what_is_held_is_free_when_the_last_holder_is_gone(path: Path) -> None:
    """Even a store that was never closed releases the file when it is collected: another file may get its inode."""
    held = [guard.hold(str(path), "apsw"), guard.hold(str(path), "apsw")]
    held.pop().release()
    with pytest.raises(SecondLibraryError) as refused:
        sqlite3.connect(path)
    held.pop().release()
    sqlite3.connect(path).close()
    del refused
    held.append(guard.hold(str(path), "apsw"))
    held.clear()
    sqlite3.connect(path).close()


def test_a_store_does_not_open_a_file_that_this_process_has_open_otherwise(path: Path) -> None:
    """An ORM may have connected first: its descriptor shows in the process's own list."""

    async def main() -> None:
        connection = sqlite3.connect(path)
        connection.execute("CREATE TABLE orders (id INTEGER)")
        with pytest.raises(SecondLibraryError, match=REMEDY):
            await app_on(path).open()
        connection.close()
        async with app_on(path) as app:
            await app.tasks["ping"].send(1)
        plain = path.open("rb")
        with pytest.raises(SecondLibraryError, match="has this file open already"):
            await app_on(path).open()
        plain.close()

    run(main)


def test_other_connections_of_the_same_library_are_welcome(path: Path) -> None:
    """One library knows all of its connections, and keeps its locks."""

    async def main() -> None:
        connection = apsw.Connection(str(path))
        connection.execute("CREATE TABLE orders (id INTEGER)")
        async with app_on(path), app_on(path) as app:
            await app.tasks["ping"].send(1)
        connection.close()

    run(main)


def test_two_stores_on_one_file_must_use_one_library(path: Path) -> None:
    """The second one is refused, with the driver of the first one."""

    async def main() -> None:
        async with app_on(path, driver="sqlite3"):
            with pytest.raises(SecondLibraryError, match="driver='sqlite3' here too"):
                await app_on(path).open()
        async with app_on(path):
            with pytest.raises(SecondLibraryError, match="driver='apsw' here too"):
                await app_on(path, driver="sqlite3").open()
        connection = apsw.Connection(str(path))
        connection.execute("SELECT 1 FROM sqlite_schema").fetchall()
        with pytest.raises(SecondLibraryError, match="apsw has this file open"):
            await app_on(path, driver="sqlite3").open()
        connection.close()

    run(main)


def test_with_the_interpreters_own_module_both_may_have_the_file_open(path: Path) -> None:
    """One library serves both: each sees the commits of the other, and nothing is lost."""

    async def main() -> None:
        async with app_on(path, driver="sqlite3") as app:
            connection = sqlite3.connect(path)
            connection.execute("CREATE TABLE orders (id INTEGER)")
            for number in range(SENDS):
                await app.tasks["ping"].send(number)
                with connection:
                    connection.execute("INSERT INTO orders VALUES (?)", (number,))
            await app.tasks["ping"].send(SENDS)
            assert len(await app.find(Query(limit=100))) == SENDS + 1
            assert await app.store.fetch("SELECT count(*) FROM orders") == [(SENDS,)]
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            connection.close()

    run(main)


# another file in its place


def remove(path: Path) -> None:
    path.unlink()


def restore(path: Path) -> None:
    """Put another database in its place, as a careless restore does."""
    move_away(path)
    connection = apsw.Connection(str(path))
    connection.execute("CREATE TABLE x (y)")
    connection.close()


def replace_log(path: Path) -> None:
    """Replace the log, as a second library does that believes it closes the last connection."""
    Path(f"{path}-wal").unlink()
    Path(f"{path}-wal").touch()


@pytest.mark.parametrize("driver", ["apsw", "sqlite3"])
@pytest.mark.parametrize("act", [move_away, remove, restore, replace_log])
def test_a_file_that_is_not_ours_any_more_accepts_nothing(path: Path, act: Callable[[Path], None], driver: str) -> None:
    """A send is answered only once it is certain that the file and its log still have their names."""
    moved_file_accepts_nothing(path, act, driver)


def test_a_transaction_is_not_answered_either(path: Path) -> None:
    """All callers that share its commit get the error."""

    async def main() -> None:
        async with app_on(path) as app:

            async def transact() -> None:
                async with app.transaction() as transaction:
                    await transaction.execute("CREATE TABLE orders (id INTEGER)")
                    move_away(path)

            with pytest.raises(StoreReplacedError):
                await transact()

    run(main)


def test_a_change_of_the_working_directory_is_no_other_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path is resolved once, when the store is opened."""
    monkeypatch.chdir(path.parent)

    async def main() -> None:
        app = App("sqlite:///shop.db")

        @app.task
        async def ping(number: int) -> None: ...

        async with app:
            monkeypatch.chdir("/")
            await ping.send(1)

    run(main)
    assert path.exists()


def test_a_link_to_the_file_is_followed(path: Path) -> None:
    """SQLite puts the log beside the file itself, not beside the link."""
    link = path.with_name("link.db")
    link.symlink_to(path)

    async def main() -> None:
        async with app_on(link) as app:
            await app.tasks["ping"].send(1)
            replace_log(path)
            with pytest.raises(StoreReplacedError):
                await app.tasks["ping"].send(2)

    run(main)


# permissions


@pytest.mark.parametrize("options", [{}, {"driver": "sqlite3"}, {"driver": "sqlite3", "journal": "delete"}])
def test_a_new_database_is_private_to_its_owner(path: Path, options: dict[str, Any]) -> None:
    """Messages may contain anything; SQLite gives the log and the shared memory the permissions of the file."""
    before = os.umask(0o022)
    try:

        async def main() -> None:
            async with app_on(path, **options) as app:
                await app.tasks["ping"].send(1)
                for one in path.parent.glob("shop.db*"):
                    if one.is_file():
                        assert stat.S_IMODE(one.stat().st_mode) == 0o600, one

        run(main)
    finally:
        os.umask(before)


def test_an_existing_database_keeps_its_rights(path: Path) -> None:
    """Its owner decided, for instance that a group may read it."""
    path.touch()
    path.chmod(0o640)
    run(lambda: _open_and_close(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_command_that_only_looks_does_not_create_the_file(tmp_path: Path) -> None:
    """A misspelt URL is reported in one line; only ``migrate`` creates a database."""
    url = f"sqlite:///{tmp_path}/typo.db"

    def onefold(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "onefold", *arguments, "--url", url]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    said = onefold("dead", "list")
    assert said.returncode != 0
    assert "typo.db does not exist" in said.stderr
    assert "Traceback" not in said.stderr
    assert list(tmp_path.iterdir()) == []
    assert onefold("migrate").returncode == 0
    assert onefold("dead", "list").returncode == 0


def test_a_directory_that_may_not_be_written_is_named(tmp_path: Path) -> None:
    """As a configuration error, not as a temporary one."""
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(ConfigurationError, match="cannot be created"):
            run(app_on(tmp_path / "shop.db").open)
    finally:
        tmp_path.chmod(0o755)
