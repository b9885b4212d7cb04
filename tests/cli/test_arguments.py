"""Arguments that people type: misspelt stores, passwords that must not be printed, unknown names."""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from onefold import App, RetryPolicy, limits
from onefold.cli import worker as working
from onefold.cli.entry import run_command
from onefold.cli.main import cli
from onefold.version import __version__

SECRET = "S3cret"


def leaves(command: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Return every command, by the words that call it."""
    inner = getattr(command, "commands", None)
    if inner is None:
        return {path: command}
    return {key: one for name, part in inner.items() for key, one in leaves(part, (*path, name)).items()}


COMMANDS = leaves(typer.main.get_command(cli))
WITH_URL = [path for path, one in COMMANDS.items() if any(parameter.name == "url" for parameter in one.params)]


#: Arguments that a command needs besides its placeholders.
_MORE = {("effects", "resolve"): ["--happened"], ("restored",): ["--yes"]}
#: Options that accept only certain texts, with one that they accept.
_VALUES = {"--value": "1"}


def call(path: tuple[str, ...], *more: str) -> list[str]:
    """Return a call of a command with a value for every required argument."""
    words = [*path, *_MORE.get(path, ())]
    for parameter in COMMANDS[path].params:
        if parameter.required:
            words += (
                ["x"]
                if parameter.param_type_name == "argument"
                else [parameter.opts[0], _VALUES.get(parameter.opts[0], "x")]
            )
    return [*words, *more]


@pytest.fixture(autouse=True)
def _nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ONEFOLD_URL", raising=False)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = run_command(cli, arguments)
    told = capsys.readouterr()
    return code, told.out, told.err


# where the store is


@pytest.mark.parametrize("path", WITH_URL, ids=" ".join)
def test_a_misspelt_file_is_not_created(
    path: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only ``migrate`` creates a database."""
    creates = path == ("migrate",)
    for given in (["--url", "sqlite:///typo.db"], ["--url-file", str(written(tmp_path, "sqlite:///typo.db"))]):
        code, _, err = run(capsys, *call(path, *given))
        assert code == (0 if creates else 1), err
        assert (tmp_path / "typo.db").exists() is creates
        assert creates or "typo.db does not exist" in err


def written(folder: Path, text: str) -> Path:
    (folder / "url").write_text(text + "\n")
    return folder / "url"


@pytest.mark.parametrize("path", WITH_URL, ids=" ".join)
def test_a_store_can_be_named_by_a_file(
    path: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A password in a file is not among the arguments, which every user of the machine can read."""
    code, _, err = run(capsys, *call(path, "--url-file", "nowhere"))
    assert (code, err) == (1, "onefold: --url-file 'nowhere' cannot be read: No such file or directory\n")


def test_the_file_holds_one_url(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("", "a\nb", "a\0b", "x" * (limits.URL_BYTES_MAX + 1)):
        code, _, err = run(capsys, "migrate", "--url-file", str(written(tmp_path, text)))
        assert code == 1
        assert "is not one line of at most 4,096 bytes" in err
    (tmp_path / "url").write_bytes(b"\xff")
    assert run(capsys, "migrate", "--url-file", "url")[2] == "onefold: --url-file 'url' is not text in UTF-8\n"
    written(tmp_path, "sqlite:///named.db")
    assert run(capsys, "migrate", "--url-file", "url")[0] == 0
    assert (tmp_path / "named.db").exists()
    assert (tmp_path / "named.db").stat().st_mode & 0o077 == 0


def test_a_directory_that_may_not_be_searched_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Run as another user, because root may search every directory."""
    (tmp_path / "locked").mkdir(mode=0)
    was = os.geteuid()
    try:
        if was == 0:
            os.seteuid(65534)
        for path in (("dead", "list"), ("migrate",)):
            code, _, err = run(capsys, *path, "--url", f"sqlite:///{tmp_path}/locked/shop.db")
            assert code == 1
            assert "cannot be reached: Permission denied; let the user of this process search its directories" in err
    finally:
        os.seteuid(was)
        (tmp_path / "locked").chmod(0o700)


# passwords


MISTYPED = [
    "postgresql+asyncpg://app:{}@db/shop",
    "postgresql:/app:{}@db/shop",
    "mysql://app:p@{}@db/shop",
    "postgresql://app:{}@[::1/shop",
    "app:{}@db/shop",
]


@pytest.mark.parametrize(
    ("path", "url"), [*((path, MISTYPED[0]) for path in WITH_URL), *((("dead", "list"), url) for url in MISTYPED[1:])]
)
def test_a_password_is_not_repeated(
    path: tuple[str, ...], url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither from its place in a URL, nor from an argument where it was typed by mistake."""
    url = url.format(SECRET)
    places = [["--url", url], ["--url-file", str(written(tmp_path, url))], [url]]
    for given in places if url.startswith("app:") else [*places, ["x:app", url], ["--limit", url]]:
        code, out, err = run(capsys, *call(path, *given))
        assert code != 0
        assert SECRET not in out + err
        assert "Traceback" not in err


def test_other_arguments_are_not_taken_for_a_url(shop: str, capsys: pytest.CaptureFixture[str]) -> None:
    for reason in ("Re:10:30 ada@example.com", "fix:a:b@c", "see https://example.com/a:b"):
        code, out, _ = run(capsys, "dead", "redrive", "--actor", "ada@example.com", "--reason", reason, "--dry-run")
        assert (code, out) == (0, "1 dead letters would be redriven\n")


# names


@pytest.mark.parametrize("where", ["", ":app", "..x", "a b:c", "shop:app:x", "shop:a-b", "1:2", "ä.:x"])
def test_an_app_that_is_no_name_is_told(where: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["worker"], ["preflight"], ["dead", "list"]):
        code, _, err = run(capsys, *command, where)
        assert (code, err.count("\n")) == (1, 1)
        assert "names no app; write MODULE:APP" in err


def test_an_error_in_the_module_of_an_app_is_not_taken_for_a_missing_app(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken_shop.py").write_text("import os\nos.nothing_of_the_kind\n")
    code, _, err = run(capsys, "worker", "broken_shop:app")
    assert code == 1
    assert "broken_shop.py" in err
    assert "has no attribute 'nothing_of_the_kind'" in err


@pytest.fixture
def shop(tmp_path: Path, store_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A store with a dead letter in the queue ``mail``."""
    app = App(store_url)

    @app.task(queue="mail", retry=RetryPolicy(max_attempts=1))
    async def fail() -> None:
        raise ValueError

    async def fill() -> None:
        await app.migrate()
        async with app:
            await fail.send()
            await app.work(until_idle=True)

    asyncio.run(fill())
    monkeypatch.setenv("ONEFOLD_URL", store_url)
    return store_url


def test_a_queue_that_is_not_known_is_told_with_those_that_are(shop: str, capsys: pytest.CaptureFixture[str]) -> None:
    warned = "onefold: there is no queue 'mial' here; did you mean 'mail'?\n"
    signed = ("--actor", "ada", "--reason", "x")
    assert run(capsys, "dead", "list", "--queue", "mial") == (0, "", f"{warned}no dead letters\n")
    for verb in ("redrive", "discard"):
        code, out, err = run(capsys, "dead", verb, "--queue", "mial", *signed)
        assert (code, out[:14], err) == (0, "0 dead letters", warned)
    assert "known: mail\n" in run(capsys, "dead", "list", "--queue", "something")[2]
    assert "mail" in run(capsys, "dead", "list", "--queue", "mail")[1]


def test_a_worker_and_a_list_of_runs_name_what_the_code_does_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "queue_shop.py").write_text(
        "from onefold import App\napp = App('sqlite:///shop.db')\n@app.task(queue='mail')\nasync def send(): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    async def supervise(*_: object) -> None: ...

    monkeypatch.setattr(working, "_supervise", supervise)
    told = "onefold: there is no queue 'mial' here; did you mean 'mail'?\n"
    assert run(capsys, "worker", "queue_shop:app", "-q", "mial:2", "-q", "mail") == (0, "", told)
    assert "did you mean 'send'?" in run(capsys, "runs", "list", "queue_shop:app", "--workflow", "sned")[2]


def test_the_version_is_an_option_and_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (("--version",), ("version",)):
        assert run(capsys, *words) == (0, f"{__version__}\n", "")


# help


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_says_what_a_command_changes_and_shows_a_call_that_works(path: tuple[str, ...]) -> None:
    """The example is parsed by the command itself, so that it stays correct."""
    said = inspect.cleandoc(COMMANDS[path].help)
    assert re.search(r"^Changes(:| ) ?[\w ]+", said, re.MULTILINE)
    (example,) = [one for one in said.split("\n\n") if one.startswith("Example: ")]
    program, *words = shlex.split(example.removeprefix("Example: "))
    assert (program, tuple(words[: len(path)])) == ("onefold", path)
    COMMANDS[path].make_context("onefold", words[len(path) :])


@pytest.mark.parametrize("columns", ["80", "40"])
def test_help_has_the_whole_names_of_options(columns: str, tmp_path: Path) -> None:
    told = subprocess.run(
        [sys.executable, "-m", "onefold", "runs", "restart", "--help"],
        env={**os.environ, "COLUMNS": columns},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    # The help is at least 50 columns wide, even on a narrower terminal.
    assert max(map(len, told.splitlines())) <= max(50, int(columns))
    for option in ("--url-file", "--from", "--actor", "--reason", "--json"):
        assert option in told
