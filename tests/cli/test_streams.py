"""Commands with unusual output streams, locales or arguments, run as real processes: never a traceback."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from onefold import App, RetryPolicy


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a dead letter in it."""
    folder = tmp_path_factory.mktemp("streams")
    app = App(f"sqlite:///{folder}/shop.db")

    @app.task(retry=RetryPolicy(max_attempts=1))
    async def fail(text: str) -> None:
        raise ValueError(text)

    async def fill() -> None:
        async with app:
            await fail.send("é漢")
            await app.work(until_idle=True)

    asyncio.run(fill())
    return folder


def shell(folder: Path, command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a shell command in which ``onefold`` is this one; bytes of its output that are not UTF-8 show as escapes."""
    known = {**os.environ, "ONEFOLD_URL": f"sqlite:///{folder}/shop.db", "python": sys.executable, **environment}
    return subprocess.run(
        ["bash", "-c", command.replace("onefold ", '"$python" -m onefold ')],
        cwd=folder,
        env=known,
        capture_output=True,
        text=True,
        errors="surrogateescape",
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("command", ["dead list --json", "dead list"])
def test_a_reader_that_goes_away_ends_a_command_silently(shop: Path, command: str) -> None:
    """The exit code is that of a program killed by SIGPIPE, so that ``pipefail`` can tell it from a failure."""
    reader, writer = os.pipe()
    os.close(reader)
    arguments = [sys.executable, "-m", "onefold", *command.split(), "--url", f"sqlite:///{shop}/shop.db"]
    done = subprocess.run(arguments, stdout=writer, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("command", ["dead list", "dead list --json", "--help"])
def test_a_full_disk_is_told_in_one_line(shop: Path, command: str) -> None:
    done = shell(shop, f"onefold {command} > /dev/full")
    assert done.returncode == 1
    assert done.stderr.startswith("onefold: ")
    assert "No space left on device" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("onefold runs list 2> /dev/full", 0),
        ("onefold runs show none 2> /dev/full", 1),
        ("onefold dead list --json <&- >&- 2>&-", 0),
    ],
)
def test_a_lost_error_output_changes_no_exit_code(shop: Path, command: str, code: int) -> None:
    """The same with an error output that was closed from the start, which is replaced by /dev/null."""
    done = shell(shop, command)
    assert (done.returncode, done.stderr) == (code, "")


def test_a_file_is_not_opened_in_the_place_of_a_closed_stream(shop: Path) -> None:
    """Otherwise text printed to descriptor 1 or 2 would be written into a database or a socket."""
    probe = (
        "import os, sys; from onefold.cli.entry import _repair_streams; _repair_streams();"
        "open('told', 'w').write(' '.join(os.readlink(f'/proc/self/fd/{n}') for n in range(3)))"
    )
    shell(shop, f'"$python" -c "{probe}" <&- >&- 2>&-')
    assert (shop / "told").read_text().split() == ["/dev/null"] * 3


@pytest.mark.parametrize("command", ["dead show {}", "worker {}"])
def test_bytes_that_are_no_text_are_refused(shop: Path, command: str) -> None:
    done = shell(shop, "onefold " + command.format(r"$'a\xff'"))
    assert done.returncode == 2
    assert done.stderr.startswith("onefold: argument ")
    assert "is not text in UTF-8" in done.stderr


@pytest.mark.parametrize(
    ("environment", "shown"),
    [
        ({"LC_ALL": "POSIX"}, "é漢"),
        ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, r"\xe9\u6f22"),
    ],
)
def test_every_locale_can_show_every_text(shop: Path, environment: dict[str, str], shown: str) -> None:
    done = shell(shop, "onefold dead list", **environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"ValueError: {shown}" in done.stdout


def test_a_user_without_a_name_in_utf_8_is_asked_for_one(shop: Path) -> None:
    done = shell(shop, "LOGNAME=$'a\\xff' onefold dead discard --reason x")
    assert done.returncode == 1
    assert done.stderr.startswith("onefold: ")
    assert len(done.stderr.splitlines()) == 1
