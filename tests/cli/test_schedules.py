"""``onefold schedules``, run through its entry point.  E9, N2."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from onefold.cli.main import cli
from onefold.errors import ConfigurationError

MODULE = """
from datetime import timedelta
from onefold import App

app = App("sqlite:///shop.db")

@app.recurring("0 3 * * *", timezone="Europe/Berlin", catchup="last")
async def close_day() -> None: ...

@app.task
async def report(region: str, top: int = 3) -> None: ...
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a new module with an app, in the working directory."""
    name = f"shop_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("ONEFOLD_URL", raising=False)
    return f"{name}:app"


def run(*arguments: str) -> str:
    result = CliRunner().invoke(cli, ["schedules", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def read(*arguments: str) -> Any:
    return json.loads(run(*arguments, "--json"))


def add(module: str, *arguments: str) -> Any:
    return read("add", "nightly", module, "report", "--arguments", '{"region": "eu"}', *arguments)


def test_a_schedule_is_made_listed_paused_resumed_run_and_removed(module: str) -> None:
    assert read("list", module) == []
    made = add(module, "--cron", "*/5 * * * *", "--timezone", "Asia/Tokyo", "--catchup", "all", "--window", "3600")
    assert {
        "name": "nightly",
        "task": "report",
        "cron": "*/5 * * * *",
        "timezone": "Asia/Tokyo",
    }.items() <= made.items()
    assert (made["catchup"], made["window_seconds"], made["paused"]) == ("all", 3_600.0, False)
    assert [one["name"] for one in read("list", module)] == ["nightly"]
    assert "is paused" in run("pause", "nightly", module)
    assert "was paused already" in run("pause", "nightly", module)
    assert read("show", "nightly", module)["preview"] == []
    assert "is resumed" in run("resume", "nightly", "--url", "sqlite:///shop.db")
    assert "was not paused" in run("resume", "nightly", module)
    assert len(read("show", "nightly", module)["preview"]) == 5
    assert len(read("run", "nightly", module)["message_id"]) == 36
    assert read("remove", "nightly", module) == {"name": "nightly", "removed": True}
    assert read("list", module) == []


def test_times_are_told_in_the_zone_and_in_utc(module: str) -> None:
    add(module, "--cron", "0 3 * * *", "--timezone", "Asia/Tokyo")
    told = run("list", module)
    assert "03:00:00 JST" in told
    assert "18:00:00 UTC" in told
    shown = run("show", "nightly", module)
    assert "18:00:00+00:00" in shown
    assert "03:00:00 JST" in shown
    first = run("preview", "30 2 * * *", "--timezone", "Asia/Tokyo", "-n", "1").splitlines()[1]
    assert "02:30:00 JST" in first
    assert "17:30:00" in first
    assert len(read("preview", "--every", "90", "--mode", "rate", "-n", "7")) == 7


def test_an_empty_list_says_so(module: str) -> None:
    assert run("list", module).strip() == "no schedules"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["pause", "nowhere", "MODULE"], "there is no schedule 'nowhere'; there are: none"),
        (["add", "n", "MODULE", "nothing", "--cron", "* * * * *"], "has no task 'nothing'; it has: close_day, report"),
        (["add", "n", "MODULE", "report", "--cron", "* * * * *"], "missing a required argument: 'region'"),
        (["add", "n", "MODULE", "report", "--cron", "* * * * *", "--arguments", "[1]"], "not a JSON object"),
        (["add", "n", "MODULE", "report", "--arguments", '{"region": "eu"}'], "either a cron expression or every="),
        (["preview", "* * *"], "five fields"),
        (["list"], "name the store"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(module: str, arguments: list[str], told: str) -> None:
    """P3."""
    with pytest.raises(ConfigurationError, match=told):
        run(*(module if one == "MODULE" else one for one in arguments))


def test_a_worker_brings_what_stands_in_code(module: str) -> None:
    """In real processes: a worker declares the schedules, and the command shows them."""
    command = [sys.executable, "-m", "onefold"]
    subprocess.run([*command, "worker", module, "--until-idle"], check=True, capture_output=True, timeout=60)
    shown = subprocess.run(
        [*command, "schedules", "list", module, "--json"], check=True, capture_output=True, timeout=60
    )
    (found,) = json.loads(shown.stdout)
    assert (found["name"], found["declared"], found["catchup"]) == ("close_day", True, "last")
