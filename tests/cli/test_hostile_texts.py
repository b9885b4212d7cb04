"""Texts of senders, handlers and servers cannot break, spoof or steer a command of an operator."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import importlib
import json
import pkgutil
import re
import shutil
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from rich.color import ColorSystem

from onefold import App, cli
from onefold.cli.entry import run_command
from onefold.cli.main import cli as commands
from onefold.cli.screen import errors, harmless, output
from onefold.clock import MICROSECONDS
from onefold.operations.dead_letters import DeadLetter
from onefold.store import Query, State
from onefold.worker.worker_list import KIND, WorkerRecord

MARKUP = "[/x] [link=http://evil.example]click[/link] [bold green]FINE[/] :smile:"
#: Markup, links, emoji codes, escape sequences of both kinds, line ends of every kind, characters that reorder others
#: or that are invisible or have no width, and stacked combining marks.
HOSTILE = (
    f"{MARKUP} \x1b]0;owned\x07\x1b[2J\x1b[31mred\x1b[0m"
    "\x1b]8;;http://evil.example\x1b\\there\x1b]8;;\x1b\\ \nforged line\r\n\u2028forged\u2029 \x9b2J \x85 \x7f \x00 \t"
    "\u202e\u2066abc\u2069 \u200b\u200d\ufeff\u00ad \u3164\u115f\u034f\ufe0f e" + "\u0301" * 20
)

MODULE = """
from onefold import App, Context, RetryPolicy, Run

app = App({url!r})
once = RetryPolicy(max_attempts=1)

@app.task(retry=once)
async def fail(text: str) -> None:
    raise ValueError(text)

@app.task(queue="mail")
async def note(text: str) -> None: ...

@app.step(retry=RetryPolicy(max_attempts=3, base=0.1))
async def charge(ctx: Context) -> str:
    async def call() -> str:
        raise TimeoutError
    return await ctx.once("card", call)

@app.workflow
async def pay(run: Run) -> str:
    return await run.step(charge)

async def create() -> int:
    return 1

@app.workflow
async def wait(run: Run) -> None:
    await run.step(create)
    await run.child(note, "x")
    await run.signal("go")

placed = app.topic("order.placed", dict[str, str])

@app.on(placed)
async def ship(event: dict[str, str]) -> None: ...
"""


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, str]]]:
    """A store with something to show for every command, and the ids in it."""
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "hostile_shop.py").write_text(MODULE.format(url=f"sqlite:///{folder}/shop.db"))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield folder, asyncio.run(fill(importlib.import_module("hostile_shop")))


async def fill(shop: Any) -> dict[str, str]:
    """Store a message in each state that commands show."""
    app: App = shop.app
    other = App(app.url)

    @other.task(queue="other")
    async def gone() -> None: ...

    async with other:
        await gone.send()
    text = HOSTILE.replace("\x00", "")
    async with app:
        dead = await shop.fail.options(key="k", subject=MARKUP, tags={"a": "b"}).send(text)
        waits, paid = await shop.wait.send(), await shop.pay.send()
        await shop.placed.publish({"a": text})
        await app.schedule(shop.note.call("x"), "0 0 1 1 *", name="yearly")
        await app.work(until_idle=True)
        await app.signal(waits.id, "later", text, id="later-1")
        while len(await app.find(Query(states=(State.PARKED,)))) < 2:
            await app.work(until_idle=True)
        coming = await shop.note.send(text)
        claimed = await app.store.claim(queues=["mail"], types=["note"], worker="worker-1", lease=900, limit=1)
        assert [one.id for one in claimed] == [coming.id]
        async with app.store.transaction() as transaction:
            seen = msgspec.json.encode(worker_at(await app.store.now()))
            await transaction.register(KIND, "worker-1", seen, version=0)
        alive = await shop.note.send("y")
    return {"DEAD": dead.id, "RUN": waits.id, "PAID": paid.id, "ALIVE": alive.id}


def worker_at(now: int) -> WorkerRecord:
    return WorkerRecord(
        name="worker-1",
        host="host",
        pid=1,
        started_at=now - MICROSECONDS,
        version="1",
        queues=["mail"],
        concurrency=10,
        lane="any",
        running=0,
        settled=0,
        checked_at=now,
        stalled_seconds=7.0,
    )


#: The arguments of each command; names in capitals are replaced by ids of the scene.
SIGNED = ["--actor", MARKUP, "--reason", MARKUP]
CALLS: dict[str, list[str]] = {
    "worker": [HOSTILE],
    "workers": ["--held"],
    "preflight": ["hostile_shop:app"],
    "cancel": ["ALIVE", *SIGNED],
    "chain": ["RUN"],
    "migrate": [],
    "restored": ["--yes", *SIGNED],
    "version": [],
    "dead list": ["--queue", "default"],
    "dead show": ["DEAD"],
    "dead redrive": SIGNED,
    "dead discard": SIGNED,
    "effects list": [],
    "effects show": ["PAID"],
    "effects resolve": ["PAID", "charge#1/card", "--happened", *SIGNED],
    "events list": [],
    "events show": ["order.placed", "--since", "90d"],
    "events unsubscribe": ["order.placed", "ship"],
    "runs list": ["--all"],
    "runs show": ["RUN", "--all"],
    "runs signal": ["RUN", "go", "--value", json.dumps(HOSTILE.replace("\x00", ""))],
    "runs cancel": ["RUN", *SIGNED],
    "runs resume": ["PAID", *SIGNED],
    "runs drop-signal": ["RUN", "--signal", "later", "--id", "later-1", *SIGNED],
    "runs replace-signal": ["RUN", "--signal", "later", "--id", "later-1", "--value", "1", *SIGNED],
    "runs restart": ["RUN", "--from", "create#1", *SIGNED],
    "schedules list": [],
    "schedules show": ["yearly"],
    "schedules add": ["daily", "hostile_shop:app", "note", "--cron", "0 0 * * *", "--arguments", '{"text": "x"}'],
    "schedules pause": ["yearly"],
    "schedules resume": ["yearly"],
    "schedules run": ["yearly"],
    "schedules remove": ["yearly"],
    "schedules preview": ["0 0 * * *"],
}
#: Exit codes other than 0: there is no module of that name, and preflight finds problems.
CODES = {"worker": 1, "preflight": 1}


def leaves(command: Any, path: str = "") -> dict[str, Any]:
    """Return every command, by the words that call it."""
    inner = getattr(command, "commands", None)
    if inner is None:
        return {path: command}
    found: dict[str, Any] = {}
    for name, one in inner.items():
        found |= leaves(one, f"{path} {name}".strip())
    return found


COMMANDS = leaves(typer.main.get_command(commands))


def options_of(command: str) -> set[str]:
    return {option for parameter in COMMANDS[command].params for option in parameter.opts}


#: Fields by which one part of an answer refers to another; they stay as they are.
_LOOKED_UP = ("id", "parent")


def poisoned(value: Any) -> Any:
    """Return a store's answer with a hostile text in every text field, also where a store would refuse it."""
    if isinstance(value, str) and not isinstance(value, Enum):
        return f"{value}{HOSTILE}"
    if isinstance(value, dict):
        return {poisoned(name): poisoned(inner) for name, inner in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(map(poisoned, value))
    if isinstance(value, msgspec.Struct):
        changed = {name: poisoned(getattr(value, name)) for name in value.__struct_fields__ if name not in _LOOKED_UP}
        made = copy.copy(value)
        for name, inner in changed.items():
            msgspec.structs.force_setattr(made, name, inner)
        return made
    if dataclasses.is_dataclass(value) or isinstance(value, DeadLetter):
        made = copy.copy(value)
        for name in getattr(value, "__dataclass_fields__", None) or vars(value):
            if name not in _LOOKED_UP and not name.startswith("_"):
                object.__setattr__(made, name, poisoned(getattr(value, name)))
        return made
    return value


@pytest.fixture
def hostile(scene: tuple[Path, dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A copy of the scene; answers of its store are poisoned before the commands see them."""
    folder, ids = scene
    shutil.copy(folder / "shop.db", tmp_path / "shop.db")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("ONEFOLD_URL", f"sqlite:///{tmp_path}/shop.db")
    for module in pkgutil.iter_modules(cli.__path__, "onefold.cli."):
        found = importlib.import_module(module.name)
        if (run_on := getattr(found, "run_on", None)) is not None:
            monkeypatch.setattr(found, "run_on", lambda app, act, run_on=run_on: poisoned(run_on(app, act)))
    return ids


def call(command: str, ids: dict[str, str], *more: str) -> int:
    return run_command(commands, [*command.split(), *(ids.get(one, one) for one in CALLS[command]), *more])


def check_lines(text: str) -> None:
    """Check that every line is the command's own, and that nothing in it steers a terminal or is hidden."""
    assert not [line for line in text.split("\n") if line.lstrip().startswith("forged")]
    assert not [line for line in text.split("\n") if harmless(line, len(line)) != line]
    assert "Traceback" not in text


def test_every_command_is_tried() -> None:
    """A new command must get a call here."""
    assert CALLS.keys() == COMMANDS.keys()


@pytest.mark.parametrize("columns", [240, 20])
@pytest.mark.parametrize("command", COMMANDS)
def test_no_text_of_a_store_reaches_a_terminal_as_it_is(
    command: str,
    columns: int,
    hostile: dict[str, str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In every field, at every width; only the command's own styles reach the terminal."""
    for screen in (output, errors):
        monkeypatch.setattr(screen, "_width", columns)
    if columns < 240:
        monkeypatch.setattr(output, "_color_system", ColorSystem.STANDARD)
        monkeypatch.setattr(output, "_force_terminal", True)
    code = call(command, hostile)
    told = capsys.readouterr()
    assert code == CODES.get(command, 0), told
    check_lines(re.sub("\x1b\\[[0-9;]*m", "", told.out))
    check_lines(told.err)
    assert "\x1b[31mred" not in told.out


@pytest.mark.parametrize("command", [name for name in COMMANDS if "--json" in options_of(name)])
def test_json_is_plain_and_says_everything(
    command: str, hostile: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """JSON escapes all other characters, so a program reads back the original texts."""
    code = call(command, hostile, "--json")
    told = capsys.readouterr()
    assert code == CODES.get(command, 0), told
    assert told.out.isascii()
    (line,) = told.out.splitlines()
    assert line.isprintable()
    json.loads(line)


@pytest.mark.parametrize("command", COMMANDS)
def test_hostile_arguments_are_not_echoed_as_they_are(
    command: str, hostile: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """People copy ids and names from mails and logs."""
    given = HOSTILE.replace("\x00", "")
    words = [given if parameter.param_type_name == "argument" else "" for parameter in COMMANDS[command].params]
    words = [word for word in words if word]
    required = [parameter.opts[0] for parameter in COMMANDS[command].params if parameter.required]
    options = [word for option in required if option.startswith("--") for word in (option, given)]
    code = run_command(commands, [*command.split(), *words, *options])
    told = capsys.readouterr()
    assert code == (0 if command == "version" else 1 if words else 2), told
    check_lines(told.out)
    check_lines(re.sub("[╭╮╰╯│─]", "", told.err))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("order-7 ä 漢 😀", "order-7 ä 漢 😀"),
        ("a\tb\nc\r", "a\\tb\\nc\\r"),
        ("\x1b[2J\x9b", "\\x1b[2J\\x9b"),
        ("\u202eabc", "\\u202eabc"),
        ("a\u200bb\u3164", "a\\u200bb\\u3164"),
        ("\ud800", "\\ud800"),
        ("e\u0301\u0302", "e\u0301\u0302"),
        ("e" + "\u0301" * 4, "e" + "\u0301" * 3 + "\\u0301"),
        ("x" * 3_000, "x" * 1_999 + "…"),
        (r"C:\\new", r"C:\\new"),
    ],
)
def test_a_text_is_shown_as_it_is_or_escaped(text: str, shown: str) -> None:
    """Plain texts are shown unchanged."""
    assert harmless(text) == shown
