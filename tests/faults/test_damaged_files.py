"""A SQLite file that is damaged, foreign or read-only is refused with the reason, and never overwritten.

``tests/unit/store/sqlite/test_sqlite_connection.py`` has the single cases; these tests damage many random places and
then use every operation.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import apsw
import pytest
from fault_scene import Scene, run

from onefold import ConfigurationError, OnefoldError
from onefold.store import Query
from onefold.store.sqlite import SQLiteStore
from onefold.testing import HastyClock, drain
from onefold.testing.vfs import FaultyFiles

MESSAGES = 40
SEED = 20_262
#: How many damaged copies are tried, of the file and of its log.
DAMAGES = 40
MAGIC = b"SQLite format 3\0"


async def fill(scene: Scene) -> None:
    """Store messages in every state."""
    for number in range(MESSAGES):
        await scene.send(("pay", "plain", "flaky")[number % 3], f"k{number}")
    await drain(scene.app)
    for number in range(MESSAGES, MESSAGES + 5):
        await scene.send("plain", f"k{number}")


def scene_on(path: Path) -> Scene:
    clock = HastyClock()
    return Scene(SQLiteStore(str(path), clock=clock), clock)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes]:
    """The bytes of a database with messages in it, and of its log."""
    path = tmp_path_factory.mktemp("sound") / "onefold.db"

    async def made() -> tuple[bytes, bytes]:
        scene = scene_on(path)
        await scene.prepare()
        async with scene.app:
            await fill(scene)
            return both_of(path)

    return run(made)


def both_of(path: Path) -> tuple[bytes, bytes]:
    return path.read_bytes(), Path(f"{path}-wal").read_bytes()


def lay_out(directory: Path, database: bytes, log: bytes | None = None) -> Path:
    path = directory / "onefold.db"
    for left in directory.iterdir():
        left.unlink()
    path.write_bytes(database)
    if log is not None:
        Path(f"{path}-wal").write_bytes(log)
    return path


async def use(path: Path) -> set[str]:
    """Use the file in every way and return the keys of its messages."""
    scene = scene_on(path)
    async with scene.app:
        await scene.send("pay", "new")
        await drain(scene.app)
        await scene.app.count()
        async with scene.app.store.transaction() as transaction:
            await transaction.purge()
        for letter in [letter async for letter in scene.app.dead_letters()]:
            await letter.as_dict()
        await scene.effects()
        return {record.envelope.subject for record in await scene.app.find(Query(limit=1_000))}


def used_or_refused(path: Path, where: str) -> set[str] | None:
    """Return the keys found in the file, or None if it was refused with an error of onefold that names it."""
    try:
        return run(lambda: use(path))
    except OnefoldError as error:
        if str(path) not in str(error):
            raise AssertionError(f"seed {SEED}, {where}: the error does not name the file") from error
        return None
    except Exception as error:
        raise AssertionError(f"seed {SEED}, {where}: {error!r}") from error


def test_random_damage_to_the_file_is_survived_or_refused_in_words_of_ours(
    sound: tuple[bytes, bytes], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Fault 15: no other exception, no hang, and never a new database in its place."""
    database, log = sound
    chance = random.Random(SEED)
    whole = _checkpointed(tmp_path, database, log)
    refused = 0
    for number in range(DAMAGES):
        damaged = bytearray(whole)
        start, length = chance.randrange(len(damaged)), chance.choice((1, 1, 16, 512, 4096))
        damaged[start : start + length] = chance.randbytes(len(damaged[start : start + length]))
        path = lay_out(tmp_path, bytes(damaged))
        found = used_or_refused(path, f"damage {number} at {start}+{length}")
        refused += found is None
        # A usable file is the same database, not a new one.
        assert found is None or len(found) > 1, f"seed {SEED}, damage {number} at {start}+{length}"
        assert len(path.read_bytes()) >= len(whole) - 4096
    record_property("damaged files", DAMAGES)
    assert 0 < refused < DAMAGES


def test_random_damage_to_the_log_costs_at_most_its_newest_part(
    sound: tuple[bytes, bytes], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Fault 15: SQLite ends the log where the checksums fail; everything before that stays, and the file is sound."""
    database, log = sound
    chance = random.Random(SEED)
    for number in range(DAMAGES // 2):
        damaged = bytearray(log)
        for _ in range(chance.randint(1, 3)):
            damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
        cut = chance.choice((len(damaged), chance.randrange(len(damaged))))
        path = lay_out(tmp_path, database, bytes(damaged[:cut]))
        if used_or_refused(path, f"damage {number}") is not None:
            connection = apsw.Connection(str(path))
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            connection.close()
        assert path.read_bytes()[:16] in (MAGIC, database[:16])
    record_property("damaged files", DAMAGES // 2)


def _checkpointed(directory: Path, database: bytes, log: bytes) -> bytes:
    path = lay_out(directory, database, log)
    connection = apsw.Connection(str(path))
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    connection.close()
    return path.read_bytes()


def test_the_database_of_another_program_keeps_everything_it_had(tmp_path: Path) -> None:
    """Fault 15: its tables, ids and rows stay; onefold's tables are added only if none of its names are in the way."""
    path = tmp_path / "theirs.db"
    connection = apsw.Connection(str(path))
    connection.execute("PRAGMA application_id = 1234; PRAGMA user_version = 77")
    connection.execute("CREATE TABLE message (body TEXT); CREATE TABLE migration (number INTEGER)")
    connection.execute("INSERT INTO message VALUES ('theirs'); INSERT INTO migration VALUES (1)")
    connection.close()

    async def scenario() -> None:
        scene = scene_on(path)
        await scene.prepare()
        async with scene.app:
            await scene.send("pay", "k")
            await drain(scene.app)
            await scene.verdict()

    run(scenario)
    connection = apsw.Connection(str(path))
    assert connection.execute("SELECT * FROM message").fetchall() == [("theirs",)]
    assert connection.execute("SELECT * FROM migration").fetchall() == [(1,)]
    assert connection.pragma("application_id") == 1234
    assert connection.pragma("user_version") == 77
    connection.close()


# read-only files


@pytest.fixture
def open_directory() -> Path:
    """A directory that every user may enter, unlike those that pytest makes."""
    directory = Path(tempfile.mkdtemp())
    directory.chmod(0o755)
    yield directory  # type: ignore[misc]
    directory.chmod(0o755)
    shutil.rmtree(directory)


def as_ordinary_user(work: Callable[[], str]) -> str:
    """Run this as an ordinary user instead of root, and return its result."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        said = "died"
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            said = work()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        finally:
            os.write(writing, said.encode())
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        heard = pipe.read().decode()
    os.waitpid(child, 0)
    return heard


@pytest.mark.parametrize(
    ("file", "directory"),
    [(0o444, 0o755), (0o666, 0o555), (0o444, 0o555), (0o000, 0o777)],
    ids=["file", "directory", "both", "unreadable"],
)
def test_a_file_or_directory_that_may_not_be_written_is_said_so(
    file: int, directory: int, open_directory: Path, sound: tuple[bytes, bytes]
) -> None:
    """Fault 15: a typed error names the file and the problem, and nothing is changed."""
    database = _checkpointed(open_directory, *sound)
    path = lay_out(open_directory, database)
    path.chmod(file)
    open_directory.chmod(directory)

    def work() -> str:
        try:
            asyncio.run(asyncio.wait_for(use(path), 30))
        except OnefoldError as error:
            return f"ours: {error}"
        return "used"

    said = as_ordinary_user(work)
    open_directory.chmod(0o755)
    path.chmod(0o644)
    assert said.startswith("ours: "), said
    assert str(path) in said
    assert "read-only" in said or "cannot be read" in said, said
    assert path.read_bytes() == database


def test_a_directory_without_rights_for_a_new_file_is_said_so(open_directory: Path) -> None:
    """Fault 15: no file is created."""
    open_directory.chmod(0o555)
    path = open_directory / "new.db"

    def work() -> str:
        try:
            asyncio.run(asyncio.wait_for(use(path), 30))
        except OnefoldError as error:
            return f"ours: {error}"
        return "used"

    said = as_ordinary_user(work)
    assert said.startswith("ours: "), said
    assert str(path) in said
    assert list(open_directory.iterdir()) == []


def test_a_file_system_without_shared_memory_is_refused(tmp_path: Path) -> None:
    """Fault 15: like a network file system, it has no memory that processes share, so the log cannot work."""
    with (
        FaultyFiles(base="unix-dotfile"),
        pytest.raises(ConfigurationError, match=r"write-ahead logging here; use another file system"),
    ):
        run(scene_on(tmp_path / "onefold.db").app.open)
