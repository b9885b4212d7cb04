"""``onefold runs``, ``effects``, ``dead``, ``cancel`` and ``preflight``, by their entry points.  H6, N2, M4, M5."""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from onefold import App
from onefold.cli.main import cli
from onefold.errors import ConfigurationError

MODULE = """
from datetime import timedelta
from onefold import App, Context, RetryPolicy, Run

app = App({url!r})

async def create(user: int) -> str:
    return f"account-{{user}}"

@app.step(retry=RetryPolicy(max_attempts=3, base=0.1))
async def charge(ctx: Context, user: int) -> str:
    async def call() -> str:
        raise TimeoutError("no answer")
    return await ctx.once("card", call)

@app.task
async def pack(user: int) -> str:
    return "packed"

@app.task(retry=RetryPolicy(max_attempts=1))
async def fail(number: int) -> None:
    raise ValueError(f"no {{number}}")

@app.workflow(key="{{user}}", subject="user:{{user}}")
async def onboard(run: Run, user: int) -> str:
    account = await run.step(create, user)
    packed, _ = await run.gather(run.child(pack, user), helper(run))
    plan = await run.signal("confirmed", timeout=timedelta(days=7), type=str)
    await run.signal("go")
    return f"{{account}} {{plan}} {{packed}}"

async def helper(run: Run) -> str:
    return await run.step(create, 0)

@app.step(retry=RetryPolicy(max_attempts=1))
async def call_off(user: int) -> None:
    raise ValueError("there is no answer")

@app.step(undo=call_off, retry=RetryPolicy(max_attempts=1))
async def fly(user: int) -> None:
    raise ValueError("no seat")

@app.saga
async def travel(run: Run, user: int) -> None:
    await run.step(fly, user)

@app.workflow
async def pay(run: Run, user: int) -> str:
    return await run.step(charge, user)
"""

Write = Callable[[App], Awaitable[Any]]


@pytest.fixture
def module(tmp_path: Path, store_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a new module with an app on its own store."""
    name = f"shop_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE.format(url=store_url))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("ONEFOLD_URL", raising=False)
    asyncio.run(App(store_url).migrate())
    return f"{name}:app"


def shop(module: str) -> Any:
    return importlib.import_module(module.partition(":")[0])


def within(module: str, write: Write) -> Any:
    """Do something with the app of the module, and work until nothing is due."""

    async def opened() -> Any:
        async with shop(module).app as app:
            answer = await write(app)
            await app.work(until_idle=True)
            return answer

    return asyncio.run(opened())


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(cli, [*arguments], env={"COLUMNS": "240"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output


def read(*arguments: str, code: int = 0) -> Any:
    return json.loads(run(*arguments, "--json", code=code))


def started(module: str, *users: int) -> list[str]:
    async def send(_: App) -> list[str]:
        return sorted([(await shop(module).onboard.send(user)).id for user in users])

    found: list[str] = within(module, send)
    return found


# runs


def test_a_run_is_drawn_with_what_it_did_and_waits_for(module: str) -> None:
    (id_,) = started(module, 7)
    drawn = run("runs", "show", id_, module)
    for told in (
        f"onboard v1 parked {id_}",
        "done create#1",
        "done child pack#1",
        "gather#1",
        "waiting signal confirmed#1",
    ):
        assert told in drawn
    assert "waits for the signal 'confirmed', until " in drawn
    told = read("runs", "show", id_, module)
    entries = {entry["name"]: entry for entry in told["run"]["entries"]}
    assert sorted(entries) == ["confirmed#1", "create#1", "gather#1", "pack#1"]
    assert entries["pack#1"]["message"]["state"] == "done"
    assert [one["name"] for one in entries["gather#1"]["entries"][0]["entries"]] == ["gather#1.1/create#1"]
    assert told["waits_for"][0].startswith("the signal 'confirmed', until ")


def test_signals_bring_a_run_to_its_end_and_early_ones_lie_in_the_mailbox(module: str) -> None:
    (id_,) = started(module, 7)
    assert read("runs", "signal", id_, "go", module, "--id", "early") == {"run": id_, "told": True}
    assert "mailbox go early" in run("runs", "show", id_, module)
    run("runs", "signal", id_, "confirmed", module, "--value", '"premium"')
    within(module, _nothing)
    ended = read("runs", "show", id_, module)
    assert (ended["run"]["state"], ended["waits_for"], ended["run"]["mailbox"]) == ("done", [], [])
    with pytest.raises(ConfigurationError, match="has ended or does not exist"):
        run("runs", "signal", id_, "go", module)


def test_a_signal_in_the_mailbox_is_replaced_or_dropped(module: str) -> None:
    """An operator can do either with a signal that the run cannot read."""
    (id_,) = started(module, 7)
    for signal_id in ("one", "two"):
        run("runs", "signal", id_, "go", module, "--id", signal_id)
    command = [id_, module, "--signal", "go", "--reason", "wrong form"]
    assert "freed of the signal" in run("runs", "drop-signal", *command, "--id", "one")
    shown = run("runs", "show", id_, module)
    assert "mailbox go two" in shown
    assert "go one" not in shown
    assert "given the signal" in run("runs", "replace-signal", *command, "--id", "two", "--value", "7")
    with pytest.raises(ConfigurationError, match="no such signal"):
        run("runs", "drop-signal", *command, "--id", "one")


async def _nothing(_: App) -> None:
    pass


def test_runs_are_listed_by_state_workflow_and_age_in_pages(module: str) -> None:
    ids = started(module, *range(5))
    within(module, lambda app: shop(module).pack.send(1))
    assert [one["id"] for one in read("runs", "list", module)["runs"]] == ids
    first = read("runs", "list", module, "-n", "2")
    assert ([one["id"] for one in first["runs"]], first["next"]) == (ids[:2], ids[1])
    rest = read("runs", "list", module, "--after", first["next"])
    assert ([one["id"] for one in rest["runs"]], rest["next"]) == (ids[2:], None)
    assert read("runs", "list", module, "--workflow", "pay")["runs"] == []
    assert read("runs", "list", module, "--older-than", "1h")["runs"] == []
    assert len(read("runs", "list", module, "--newer-than", "1h")["runs"]) == 5
    assert read("runs", "list", module, "--state", "done")["runs"] == []
    run("runs", "cancel", ids[0], module, "--reason", "moved away")
    assert len(read("runs", "list", module)["runs"]) == 4
    assert len(read("runs", "list", module, "--all")["runs"]) == 5
    shown = run("runs", "list", module, "-n", "1")
    assert ids[1] in shown
    assert "onboard v1" in shown


def test_a_run_goes_back_and_is_resumed(module: str) -> None:
    (id_,) = started(module, 7)
    back = read("runs", "restart", id_, module, "--from", "confirmed#1", "--reason", "again", "--actor", "ada")
    assert back["forgotten"] == ["confirmed#1"]
    within(module, _nothing)
    assert "resumed" in run("runs", "resume", id_, module, "--reason", "look again")
    with pytest.raises(ConfigurationError, match="no step 'nothing#1'"):
        run("runs", "restart", id_, module, "--from", "nothing#1", "--reason", "again")


# effects


def test_an_uncertain_effect_is_shown_with_the_command_that_resolves_it(module: str) -> None:
    """B20: the effect of a workflow's step is resolved as happened, and the run continues with the given value."""

    async def send(_: App) -> str:
        return str((await shop(module).pay.send(7)).id)

    id_ = within(module, send)
    (found,) = read("effects", "list", module)
    assert (found["id"], [one["name"] for one in found["effects"]]) == (id_, ["charge#1/card"])
    assert f"onefold effects resolve {id_} charge#1/card" in run("runs", "show", id_, module)
    assert read("runs", "list", module)["runs"][0]["failure"]["reason"] == "uncertain"
    assert run("effects", "show", id_, module).splitlines()[1].split()[:2] == ["charge#1/card", "uncertain"]
    run("effects", "resolve", id_, "charge#1/card", module, "--again", "--reason", "look again")
    within(module, _nothing)
    arguments = ("effects", "resolve", id_, "charge#1/card", module, "--happened", "--value", '"paid"')
    assert read(*arguments, "--reason", "the bank says so")["resolved"] == "happened"
    within(module, _nothing)
    assert read("runs", "show", id_, module)["run"]["state"] == "done"
    assert read("effects", "list", module) == []
    with pytest.raises(ConfigurationError, match="is not uncertain"):
        run(*arguments, "--reason", "again")
    with pytest.raises(ConfigurationError, match="give one of"):
        run("effects", "resolve", id_, "card", module, "--reason", "what?")


def test_a_saga_that_is_stuck_is_listed_and_resolved(module: str) -> None:
    """I3: the undo is shown below its step, with the command that lets the saga continue."""

    async def send(_: App) -> str:
        return str((await shop(module).travel.send(7)).id)

    id_ = within(module, send)
    (found,) = read("effects", "list", module)
    assert [(one["name"], one["state"]) for one in found["effects"]] == [("undo:fly#1", "stuck")]
    drawn = run("runs", "show", id_, module)
    assert "stuck undo:fly#1" in drawn
    assert f"onefold effects resolve {id_} undo:fly#1" in drawn
    run("effects", "resolve", id_, "undo:fly#1", module, "--happened", "--reason", "by phone")
    within(module, _nothing)
    (fly, undone) = read("runs", "show", id_, module)["run"]["entries"]
    assert (fly["entries"][0]["kind"], fly["entries"][0]["state"], undone["kind"]) == ("undo", "done", "undo")
    assert read("effects", "list", module) == []


# dead letters


def test_dead_letters_are_counted_redriven_and_discarded(module: str) -> None:
    async def send(app: App) -> list[str]:
        return [one.id for one in await app.send_many(shop(module).fail.call(number) for number in range(5))]

    ids = within(module, send)
    assert [one["id"] for one in read("dead", "list", module)] == sorted(ids)
    assert "ValueError: no " in run("dead", "list", module, "-n", "1")
    assert read("dead", "show", ids[0], module)["error_type"] == "ValueError"
    assert read("dead", "redrive", module, "--dry-run", "--reason", "-") == {"redriven": 5, "dry_run": True}
    assert read("dead", "redrive", module, "-n", "2", "--reason", "fixed") == {"redriven": 2, "dry_run": False}
    within(module, _nothing)
    assert "1 dead letters were discarded" in run("dead", "discard", module, "--id", ids[0], "--reason", "no use")
    assert len(read("dead", "list", module)) == 4
    assert read("dead", "redrive", module, "--type", "pack", "--reason", "-")["redriven"] == 0


def test_a_message_is_cancelled_once(module: str) -> None:
    id_ = asyncio.run(_delayed(module))
    assert "was cancelled" in run("cancel", id_, module, "--reason", "a mistake")
    with pytest.raises(ConfigurationError, match="has ended or does not exist"):
        run("cancel", id_, module, "--reason", "a mistake")


async def _delayed(module: str) -> str:
    async with shop(module).app:
        return str((await shop(module).fail.options(delay=600).send(1)).id)


# preflight


def test_preflight_says_what_would_break_and_fails(module: str, tmp_path: Path) -> None:
    """H6, O7: runs by their journals, messages by type and arguments, schedules by the calls they will send."""
    (id_,) = started(module, 7)
    asyncio.run(_delayed(module))
    assert read("preflight", module) == {"checked": 2, "problems": []}
    run("schedules", "add", "nightly", module, "fail", "--cron", "0 3 * * *", "--arguments", '{"number": 1}')
    name, _, _ = module.partition(":")
    text = (tmp_path / f"{name}.py").read_text()
    text = text.replace("async def fail(number: int)", "async def fail(number: str)")
    text = text.replace("    account = await run.step(create, user)\n", "    account = ''\n")
    (tmp_path / f"{name}_new.py").write_text(text)
    problems = {
        one["schedule"] or one["message_type"]: (one["kind"], one["detail"])
        for one in read("preflight", f"{name}_new:app", code=1)["problems"]
    }
    assert problems["nightly"][0] == problems["fail"][0] == "arguments"
    assert problems["onboard"] == ("journal", "the code says confirmed#1, the journal says create#1")
    assert "2 messages checked, 3 would break" in run("preflight", f"{name}_new:app", code=1)
    assert id_ in run("preflight", f"{name}_new:app", code=1)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["runs", "show", "nothing", "MODULE"], "there is no run 'nothing'"),
        (["runs", "list", "MODULE", "--state", "asleep"], "there are: scheduled, leased"),
        (["runs", "list", "MODULE", "--older-than", "soon"], "is not a duration; write 90s"),
        (["runs", "signal", "x", "go", "MODULE", "--value", "yes"], "--value is not JSON"),
        (["dead", "show", "nothing", "MODULE"], "there is no dead letter 'nothing'"),
        (["runs", "list"], "name the store"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(module: str, arguments: list[str], told: str) -> None:
    """P3."""
    with pytest.raises(ConfigurationError, match=told):
        run(*(module if one == "MODULE" else one for one in arguments))
