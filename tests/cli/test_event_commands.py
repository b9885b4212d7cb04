"""``onefold events`` and ``onefold chain``, run through their entry point.  M6, N2."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from onefold import App
from onefold.cli.main import cli
from onefold.errors import ConfigurationError
from onefold.processes.load_app import load_app

MODULE = """
from onefold import App, Context, Reject

app = App("sqlite:///shop.db")
placed = app.topic("order.placed", int, key="{event}", subject="order:{event}")
unheard = app.topic("order.forgotten", int)

@app.on(placed)
async def reserve(order: int) -> None: ...

@app.on(placed)
async def mail(ctx: Context, order: int) -> None:
    raise Reject("no [address]")
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"shop_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("ONEFOLD_URL", raising=False)
    return f"{name}:app"


def run(*arguments: str) -> str:
    result = CliRunner().invoke(cli, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def read(*arguments: str) -> Any:
    return json.loads(run(*arguments, "--json"))


def publish(module: str) -> str:
    app: App = load_app(module)

    async def act() -> str:
        async with app:
            first = await app.tasks["order.placed"].send(7)
            await app.tasks["order.placed"].send(7)
            await app.tasks["order.forgotten"].send(1)
            await app.work(until_idle=True)
            return first.id

    return asyncio.run(act())


def test_subscriptions_are_listed_shown_and_removed(module: str) -> None:
    publish(module)
    listed = read("events", "list", module)
    assert [one["subscriber"] for one in listed["subscriptions"]] == ["mail", "reserve"]
    assert listed["without_subscribers"] == ["order.forgotten"]
    shown = read("events", "show", "order.placed", module)
    assert [one["copies"] for one in shown["published"]] == [2]
    assert [one["copies"] for one in read("events", "show", "order.forgotten", module)["published"]] == [0]
    assert "no subscriber" in run("events", "list", module)
    assert "no subscriber" in run("events", "show", "order.forgotten", module)
    assert "order:7" in run("events", "show", "order.placed", module, "--since", "2h")
    assert "nothing was published" in run("events", "show", "no.such", module)
    assert read("events", "unsubscribe", "order.placed", "mail", module)["removed"]
    assert "does not subscribe" in run("events", "unsubscribe", "order.placed", "mail", module)
    url = "sqlite:///shop.db"
    assert [one["subscriber"] for one in read("events", "list", "--url", url)["subscriptions"]] == ["reserve"]


def test_a_chain_is_drawn_with_what_went_wrong(module: str) -> None:
    first = publish(module)
    drawn = run("chain", first, "--url", "sqlite:///shop.db")
    lines = drawn.splitlines()
    assert lines[0] == f"{first}  1 dead, 2 done"
    assert "order.placed  done" in lines[1]
    assert "1 duplicate" in lines[1]
    assert any("mail  dead" in line and "rejected: no [address]" in line for line in lines)
    links = read("chain", first, module)["links"]
    assert (links[0]["message_type"], links[0]["depth"]) == ("order.placed", 0)
    assert {link["parent"] for link in links[1:]} == {first}
    with pytest.raises(ConfigurationError, match="there is no message"):
        run("chain", "unknown", module)
