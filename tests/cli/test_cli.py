"""The command line, run as real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

MODULE = """
from onefold import App, Context
app = App("sqlite:///shop.db")

@app.task(key="{number}")
async def note(ctx: Context, number: int) -> None:
    await ctx.execute("INSERT INTO noted VALUES (?)", number)
"""

SEND = """
import asyncio, sys
from shop import app, note
async def main():
    async with app:
        async with app.transaction() as tx:
            await tx.execute("CREATE TABLE IF NOT EXISTS noted (number INTEGER)")
        for number in range(int(sys.argv[1])):
            await note.send(number)
asyncio.run(main())
"""


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(MODULE)
    (tmp_path / "send.py").write_text(SEND)
    return tmp_path


def onefold(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "ONEFOLD_URL"}
    return subprocess.run(
        [sys.executable, "-m", "onefold", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
        check=False,
    )


def noted(folder: Path) -> list[int]:
    import apsw

    connection = apsw.Connection(str(folder / "shop.db"))
    try:
        return sorted(row[0] for row in connection.execute("SELECT number FROM noted"))
    finally:
        connection.close()


def test_a_worker_runs_what_another_process_sent(shop: Path) -> None:
    subprocess.run([sys.executable, "send.py", "25"], cwd=shop, check=True, timeout=60)
    done = onefold(shop, "worker", "shop:app", "--until-idle")
    assert done.returncode == 0, done.stderr
    assert "25 messages settled" in done.stderr
    assert noted(shop) == list(range(25))


def test_sigterm_stops_a_worker_gracefully(shop: Path) -> None:
    subprocess.run([sys.executable, "send.py", "3"], cwd=shop, check=True, timeout=60)
    worker = subprocess.Popen(
        [sys.executable, "-m", "onefold", "worker", "shop:app"], cwd=shop, stderr=subprocess.PIPE, text=True
    )
    try:
        assert worker.stderr is not None
        assert "ready" in worker.stderr.readline()
        worker.send_signal(signal.SIGTERM)
        _, told = worker.communicate(timeout=30)
    finally:
        worker.kill()
        worker.wait()
    assert worker.returncode == 0
    assert "stopped" in told


@pytest.mark.parametrize(
    ("where", "told"),
    [
        ("nowhere:app", "there is no module 'nowhere'"),
        ("shop:nothing", "has no 'nothing'"),
        ("shop:note", "not an App"),
    ],
)
def test_a_wrong_app_is_explained_in_one_line(shop: Path, where: str, told: str) -> None:
    failed = onefold(shop, "worker", where)
    assert failed.returncode == 1
    assert told in failed.stderr
    assert "Traceback" not in failed.stderr


def test_migrate_applies_once_and_says_so(shop: Path) -> None:
    first, second = onefold(shop, "migrate", "shop:app"), onefold(shop, "migrate", "shop:app")
    assert (first.returncode, second.returncode) == (0, 0)
    assert "nothing to do" in second.stdout


def test_migrate_prints_the_identity_and_a_copy_can_be_given_another(shop: Path) -> None:
    """A restore keeps the identity, which is part of keys for outside providers; a copy must get its own."""

    def identity() -> str:
        (line,) = [line for line in onefold(shop, "migrate", "shop:app").stdout.splitlines() if "database" in line]
        assert line.endswith(" of app app")
        return line.split()[1]

    first = identity()
    for options, stays in (([], True), (["--new-identity"], False)):
        told = onefold(shop, "restored", "shop:app", "--actor", "ada", "--reason", "a test", "--yes", *options)
        assert told.returncode == 0, told.stderr
        assert (identity() == first) is stays


@pytest.mark.parametrize(("url", "table"), [("sqlite:///x.db", "onefold_message"), ("postgresql:///x", "delivery")])
def test_migrate_prints_the_sql_without_running_it(shop: Path, url: str, table: str) -> None:
    printed = onefold(shop, "migrate", "--print", "--url", url)
    assert printed.returncode == 0, printed.stderr
    assert table in printed.stdout
    assert not (shop / "x.db").exists()


def test_help_explains_every_command(shop: Path) -> None:
    for command in (
        [],
        ["runs"],
        ["effects"],
        ["dead"],
        ["preflight"],
        ["worker"],
        ["workers"],
        ["migrate"],
        ["restored"],
        ["version"],
    ):
        told = onefold(shop, *command, "--help")
        assert told.returncode == 0
        assert "Usage" in told.stdout
