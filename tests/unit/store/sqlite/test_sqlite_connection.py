"""The file under the SQLite store: what is wrong with it is said plainly, and nothing is written over it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import apsw
import pytest

from onefold import App, ConfigurationError, OnefoldError, SchemaError, StoreError
from onefold.store import Query
from onefold.store.sqlite import SQLiteStore
from onefold.store.sqlite.connection import refuse_unsafe_file
from onefold.testing import FakeClock

MESSAGES = 60


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "app.db"


def app_on(path: Path, **given: Any) -> App:
    app = App(f"sqlite:///{path}", **given)

    @app.task(key="{number}")
    async def ping(number: int) -> int:
        return number

    return app


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(60):
            await main()

    asyncio.run(within())


def fill(path: Path) -> bytes:
    """Make a database with messages in it and return its bytes."""

    async def main() -> None:
        async with app_on(path) as app:
            await app.send_many(app.tasks["ping"].call(number) for number in range(MESSAGES))
            await app.work(until_idle=True)

    run(main)
    with apsw.Connection(str(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    connection.close()
    return path.read_bytes()


def opening_fails(path: Path, error: type[Exception], match: str = "") -> None:
    """Opening raises this error, and leaves the file as it was and no other beside it."""
    before = path.read_bytes()
    with pytest.raises(error, match=match):
        run(app_on(path).open)
    assert path.read_bytes() == before
    assert {one.name for one in path.parent.iterdir()} <= {path.name, f"{path.name}-wal", f"{path.name}-shm"}


# damaged files


@pytest.mark.parametrize(
    "content",
    [b"not a database", b"x" * 8192, b"\0" * 4096, b"SQLite format 2\0" + b"x" * 5000, b"PK\x03\x04" * 2000, b"\n"],
    ids=["text", "letters", "zeros", "older SQLite", "archive", "newline"],
)
def test_a_file_that_is_no_database_is_refused_and_not_overwritten(path: Path, content: bytes) -> None:
    """Fault 15: with a hint at what to do."""
    path.write_bytes(content)
    opening_fails(path, SchemaError, "restore a backup")


@pytest.mark.parametrize("length", [10, 16, 50, 99, 100, 511, 1000, 4095])
def test_a_file_cut_within_its_first_page_is_refused_and_not_overwritten(path: Path, length: int) -> None:
    """Fault 15."""
    path.write_bytes(fill(path)[:length])
    opening_fails(path, (SchemaError, StoreError), "app.db")  # type: ignore[arg-type]


def test_an_empty_file_is_a_new_database_unless_its_log_remains(path: Path) -> None:
    """Fault 15: a process killed while it created the file leaves an empty one; a log beside it means a lost one."""
    path.touch()
    fill(path)
    path.write_bytes(b"")
    Path(f"{path}-wal").write_bytes(b"remains")
    opening_fails(path, SchemaError, "restore a backup")


async def use(path: Path) -> int:
    """Use the file in every way and return how many messages it has."""
    async with app_on(path) as app:
        await app.tasks["ping"].send(MESSAGES + 1)
        await app.work(until_idle=True)
        await app.count()
        _ = [letter async for letter in app.dead_letters()]
        return len(await app.find(Query(limit=1_000)))


async def open_and_close(path: Path) -> None:
    async with app_on(path):
        pass


def used_or_refused(path: Path) -> bool:
    """Whether the file could be used; what cannot must say so with an error of ours."""
    try:
        asyncio.run(asyncio.wait_for(use(path), 60))
    except OnefoldError:
        return False
    return True


@pytest.mark.parametrize("part", [0.25, 0.5, 0.75, 0.99])
def test_a_file_cut_short_is_refused_before_or_while_it_is_used(path: Path, part: float) -> None:
    """Fault 15: no other exception escapes, and it is not taken for a new database."""
    whole = fill(path)
    pages = len(whole) // 4096
    path.write_bytes(whole[: int(pages * part) * 4096])
    assert not used_or_refused(path)
    assert path.read_bytes()[:16] == whole[:16]


def test_a_file_with_flipped_bytes_is_opened_or_refused_unchanged(path: Path) -> None:
    """Fault 15: in the header, in the schema and in the pages; no other exception, no write before a refusal."""
    whole = fill(path)
    offsets = [*range(100), *range(100, 4096, 251), *range(4096, len(whole), 1787)]
    refused = 0
    for offset in offsets:
        damaged = bytearray(whole)
        damaged[offset] ^= 0xFF
        for left in (Path(f"{path}-wal"), Path(f"{path}-shm")):
            left.unlink(missing_ok=True)
        path.write_bytes(damaged)
        try:
            asyncio.run(open_and_close(path))
        except OnefoldError:
            refused += 1
            assert path.read_bytes() == bytes(damaged)
    assert refused > 16


def test_a_damaged_text_in_a_row_is_a_typed_error(path: Path) -> None:
    """Fault 15: SQLite has no checksums, so damage may show only when a row is read."""
    path.write_bytes(fill(path).replace(b"default", b"\xff" * 7))
    assert not used_or_refused(path)


def test_a_damaged_log_costs_at_most_what_was_in_it(path: Path) -> None:
    """Fault 15: SQLite's own checksums end it where the damage begins; the rest of the file is used."""
    fill(path)
    wal = Path(f"{path}-wal")

    def files() -> tuple[bytes, bytes]:
        return path.read_bytes(), wal.read_bytes()

    async def send_more() -> tuple[bytes, bytes]:
        async with app_on(path) as app:
            await app.send_many(app.tasks["ping"].call(number) for number in range(MESSAGES, MESSAGES * 2))
            return files()

    async def found() -> int:
        async with app_on(path) as app:
            return len(await app.find(Query(limit=1_000)))

    kept, log = asyncio.run(send_more())
    for damaged in (log[: len(log) // 2], log[:40] + b"x" * 64 + log[104:], b"x" * len(log)):
        path.write_bytes(kept)
        wal.write_bytes(damaged)
        Path(f"{path}-shm").unlink(missing_ok=True)
        assert MESSAGES <= asyncio.run(found()) < MESSAGES * 2


# other people's files


def alter(path: Path, statement: str, *parameters: Any) -> None:
    connection = apsw.Connection(str(path))
    connection.execute(statement, parameters).fetchall()
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    connection.close()


def test_a_database_with_tables_of_the_users_is_shared_with_them(path: Path) -> None:
    """J1: that is what one commit is for."""
    alter(path, "CREATE TABLE orders (id INTEGER)")
    fill(path)
    connection = apsw.Connection(str(path))
    assert connection.execute("SELECT count(*) FROM orders").fetchall() == [(0,)]
    connection.close()


def test_tables_named_like_ours_that_are_not_ours_are_refused(path: Path) -> None:
    """Fault 15."""
    alter(path, "PRAGMA journal_mode = WAL")
    alter(path, "CREATE TABLE onefold_message (mine TEXT)")
    opening_fails(path, SchemaError, "onefold did not make")


def test_a_database_that_is_refused_keeps_its_journal_mode(path: Path) -> None:
    """Fault 15: its owner may rely on it."""
    alter(path, "CREATE TABLE onefold_message (mine TEXT)")
    opening_fails(path, SchemaError, "onefold did not make")


def test_a_schema_from_the_future_is_refused(path: Path) -> None:
    """Fault 25: an old worker writes nothing into a newer database."""
    fill(path)
    alter(path, "INSERT INTO onefold_migration VALUES (9999, '9999_later.sql', 'x', 0)")
    opening_fails(path, SchemaError, "upgrade onefold")


def test_a_migration_that_was_applied_with_another_content_is_refused(path: Path) -> None:
    """Fault 15: somebody changed a released migration, or the database is not ours."""
    fill(path)
    alter(path, "UPDATE onefold_migration SET checksum = 'other' WHERE number = 1")
    opening_fails(path, SchemaError, "another content")


def test_opening_again_applies_nothing(path: Path) -> None:
    """Q5."""
    fill(path)
    assert asyncio.run(app_on(path).migrate()) == []


# where the file is


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "ceph"])
def test_a_network_file_system_is_refused(path: Path, kind: str) -> None:
    """Q1, fault 15: with what to do instead."""
    mounts = f"/dev/sda1 / ext4 rw 0 0\nserver:/x {path.parent.resolve()} {kind} rw 0 0\n"
    with pytest.raises(ConfigurationError, match=r"network file system .* PostgreSQL"):
        refuse_unsafe_file(str(path), mounts)
    assert not path.exists()


def test_the_innermost_mount_decides(path: Path) -> None:
    """Q1: a local disk below a network directory is local, and the other way round."""
    here = path.parent.resolve()
    nested = f"server:/x {here.parent} nfs rw 0 0\n/dev/sdb1 {here} ext4 rw 0 0\n"
    refuse_unsafe_file(str(path), nested)
    with pytest.raises(ConfigurationError):
        refuse_unsafe_file(str(path), f"/dev/sdb1 {here.parent} ext4 rw 0 0\nserver:/x {here} nfs rw 0 0\n")
    refuse_unsafe_file(str(path), f"server:/x {here}-elsewhere nfs rw 0 0\nbroken line\n")


def test_a_mount_point_with_a_blank_in_its_name_is_understood(tmp_path: Path) -> None:
    """Q1: the kernel writes it as \\040."""
    blank = tmp_path / "with space"
    blank.mkdir()
    mounts = f"//server/share {str(blank.resolve()).replace(' ', chr(92) + '040')} cifs rw 0 0\n"
    with pytest.raises(ConfigurationError, match="cifs"):
        refuse_unsafe_file(str(blank / "app.db"), mounts)


def test_a_directory_that_does_not_exist_is_named(tmp_path: Path) -> None:
    """P3: it is not created in silence."""
    with pytest.raises(ConfigurationError, match="nowhere does not exist"):
        run(app_on(tmp_path / "nowhere" / "app.db").open)
    assert not (tmp_path / "nowhere").exists()


def test_a_directory_in_the_place_of_the_file_is_a_typed_error(tmp_path: Path) -> None:
    """Fault 15."""
    with pytest.raises(OnefoldError, match=tmp_path.name):
        run(app_on(tmp_path).open)


def in_a_child(work: Callable[[], int], *, harmless: bool = False) -> int:
    """Run this in a forked process and return its exit code; ``harmless`` takes root's rights away from it."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            if harmless and os.geteuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            code = work()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_file_that_may_not_be_written_is_a_typed_error() -> None:
    """Fault 15: and it stays as it is."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "app.db"
        before = fill(path)
        path.chmod(0o444)
        Path(directory).chmod(0o555)

        def work() -> int:
            try:
                run(app_on(path).open)
            except OnefoldError as error:
                return 42 if str(path) in str(error) else 43
            return 44

        try:
            assert in_a_child(work, harmless=True) == 42
        finally:
            Path(directory).chmod(0o755)
        assert path.read_bytes() == before


# several processes


PEER = """
import asyncio, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from test_sqlite_connection import app_on

async def main():
    async with app_on(Path(sys.argv[1])) as app:
        for number in range(100):
            await app.tasks["ping"].send(number)
        await app.work(until_idle=True)

asyncio.run(main())
"""


def test_two_processes_on_one_file_share_its_messages(path: Path) -> None:
    """Q3: both send the same hundred keys and work; there are a hundred messages, all done."""
    command = [sys.executable, "-c", PEER, str(path), os.path.dirname(__file__)]
    peers = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for peer in peers:
        _, complaints = peer.communicate(timeout=120)
        assert peer.returncode == 0, complaints

    async def main() -> None:
        async with app_on(path) as app:
            await app.work(until_idle=True)
            records = await app.find(Query(limit=1_000))
            assert sorted(int(record.result or b"-1") for record in records) == list(range(100))

    run(main)


def test_a_store_used_after_a_fork_is_a_typed_error_and_the_parent_goes_on(path: Path) -> None:
    """Fault 41: the child shares descriptors and has no threads."""

    async def main() -> None:
        async with app_on(path) as app:
            first = await app.tasks["ping"].send(1)

            def work() -> int:
                refused = 0
                for verb in (app.count, lambda: app.tasks["ping"].send(2), lambda: app.find(Query())):
                    try:
                        asyncio.run(asyncio.wait_for(verb(), 10))  # type: ignore[arg-type]
                    except StoreError as error:
                        refused += "fork" in str(error)
                return 40 + refused

            assert in_a_child(work) == 43
            await app.work(until_idle=True)
            assert await first.result() == 1
            assert len(await app.find(Query())) == 1

    run(main)


def test_after_the_machine_was_started_again_leases_are_free_at_once(path: Path) -> None:
    """2.3 of the faults: the steady clock began anew, and nobody who held a lease is alive."""

    async def claimed(boot: str) -> int:
        app = app_on(path, store=SQLiteStore(str(path), clock=FakeClock(), boot=boot))
        async with app:
            if not await app.find(Query()):
                await app.tasks["ping"].send(7)
            return len(await app.store.claim(["default"], types=["ping"], limit=1, lease=30, worker=boot))

    async def main() -> None:
        assert await claimed("monday") == 1
        assert await claimed("monday") == 0
        assert await claimed("tuesday") == 1
        assert await claimed("tuesday") == 0

    run(main)
