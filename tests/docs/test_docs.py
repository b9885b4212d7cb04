"""The documentation agrees with the code: its examples run, its links resolve, its tables match the library."""

from __future__ import annotations

import ast
import asyncio
import codeop
import contextlib
import inspect
import io
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import apsw
import pytest
import typer

from onefold import App, errors, limits
from onefold.brokers.redis import RedisTransport
from onefold.brokers.transport import Transport, TransportCapabilities
from onefold.store import MOVES, Capabilities, Store, Transaction
from onefold.testing.brokers import DURABLE, RedisServer

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "ARCHITECTURE.md", *(ROOT / "docs").rglob("*.md")])
GUARANTEES = ROOT / "docs/guarantees.md"

_BLOCK = re.compile(r"^```(\w+)[ ]?([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_PRINTS = re.compile(r"# prints: (.*)$", re.MULTILINE)
#: Programs that a reader has or knows how to get.
_KNOWN_PROGRAMS = {"cd", "createdb", "git", "kill", "pip", "psql", "python"}


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, the words after it, its text and its line."""

    page: Path
    language: str
    words: tuple[str, ...]
    text: str
    line: int


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(page, found[1], tuple(found[2].split()), found[3], text.count("\n", 0, found.start()) + 2)
        for found in _BLOCK.finditer(text)
    ]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def prose_of(page: Path) -> str:
    return _BLOCK.sub("", page.read_text())


# code


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty directory to run a page in, which is also on the import path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("ONEFOLD_URL", raising=False)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if (tmp_path / f"{name}.py").exists():
            del sys.modules[name]


async def run_block(block: Block, namespace: dict[str, Any]) -> str:
    """Run one block, which may use ``await`` at its top level, and return what it printed."""
    source = "\n" * (block.line - 1) + block.text
    code = compile(source, name_of(block.page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        # A whole program starts its own event loop, so it runs in its own thread.
        answer = (
            await asyncio.to_thread(eval, code, namespace) if "asyncio.run(" in block.text else eval(code, namespace)
        )
        if inspect.isawaitable(answer):
            await answer
    return printed.getvalue()


def save(name: str, text: str) -> None:
    Path(name).write_text(text)


async def run_page(blocks: list[Block]) -> None:
    """Run a page from top to bottom.

    Its blocks share one namespace; ``fresh`` starts a new one, and a block with a file name is saved instead.
    """
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks:
        files = [word for word in block.words if word.endswith(".py")]
        if files:
            save(files[0], block.text)
            continue
        if "fresh" in block.words:
            await close_apps(namespace)
            namespace = {"__name__": "__main__"}
        printed = await run_block(block, namespace)
        if expected := _PRINTS.findall(block.text):
            assert printed.splitlines() == expected, f"{name_of(block.page)}:{block.line}"
    await close_apps(namespace)


async def close_apps(namespace: dict[str, Any]) -> None:
    for value in namespace.values():
        if isinstance(value, App):
            await value.close()


@pytest.mark.empty
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_python_block_of_the_page_runs(
    page: Path, workshop: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = [block for block in blocks_of(page) if block.language == "python"]
    if any("postgresql" in block.words for block in blocks):
        monkeypatch.setenv("ONEFOLD_URL", request.getfixturevalue("postgres_url"))
    if any("redis" in block.words for block in blocks):
        monkeypatch.setenv("REDIS_URL", request.getfixturevalue("redis_url"))
    asyncio.run(asyncio.wait_for(run_page(blocks), 120))


def paste(text: str) -> str | None:
    """Give a text to a console line by line, as a paste does; return the error, if there is one."""
    compiler, waiting = codeop.CommandCompiler(), list[str]()
    compiler.compiler.flags |= ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    for number, line in enumerate([*text.splitlines(), ""], 1):
        waiting.append(line)
        try:
            if compiler("\n".join(waiting), "<console>", "single") is not None:
                waiting.clear()
        except SyntaxError as error:
            return f"line {number}: {error.msg}"
    return "it has no end" if any(waiting) else None


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_python_block_of_the_page_can_be_pasted_into_a_console(page: Path) -> None:
    """``python -m asyncio`` ends an indented block at an empty line, and only there.

    A ``script``, such as a class with several methods, has empty lines inside and belongs in a file.
    """
    blocks = [block for block in blocks_of(page) if block.language == "python"]
    pasted = [block for block in blocks if not any(word == "script" or word.endswith(".py") for word in block.words)]
    assert not [(block.line, wrong) for block in pasted if (wrong := paste(block.text)) is not None]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_of_the_page_exists(page: Path) -> None:
    for block in blocks_of(page):
        if block.language == "bash":
            for line in block.text.splitlines():
                check_command(shlex.split(line, comments=True))


def check_command(words: list[str]) -> None:
    while words and "=" in words[0]:
        words = words[1:]
    if not words:
        return
    program, *arguments = words
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(arguments) <= set(targets)
    elif program == "onefold":
        from onefold.cli.main import cli

        command = typer.main.get_command(cli)
        while hasattr(command, "commands"):
            name, *arguments = arguments
            command = command.commands[name]
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        assert {word.partition("=")[0] for word in arguments if word.startswith("-")} <= known | {"--help"}
    else:
        assert program in _KNOWN_PROGRAMS, words


# links and words


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    for link in _LINK.findall(prose_of(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name_of(page)} links to {link}"
        if anchor:
            assert anchor in anchors_of(target), f"{name_of(page)} links to {link}"


def anchors_of(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", prose_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_what_is_not_promised_is_named_only_to_say_so(page: Path) -> None:
    for line in page.read_text().splitlines():
        if re.search(r"exactly[- ]once", line, re.IGNORECASE):
            assert re.search(r"\b(not|never|no)\b", line), line


def test_every_page_can_be_reached_from_the_index() -> None:
    reached, waiting = set[Path](), [ROOT / "docs/index.md"]
    while waiting:
        page = waiting.pop()
        if page in reached or page.suffix != ".md":
            continue
        reached.add(page)
        links = (link.partition("#")[0] for link in _LINK.findall(prose_of(page)) if not re.match(r"[a-z]+:", link))
        waiting += [(page.parent / link).resolve() for link in links if link]
    assert {page for page in PAGES if "docs" in page.parts} <= reached


# promises


def promises() -> list[str]:
    return re.findall(r"^- \*\*P\d+\.\*\* .+$", GUARANTEES.read_text(), re.MULTILINE)


def test_every_promise_is_proved_by_a_test() -> None:
    assert [int(re.findall(r"P(\d+)", line)[0]) for line in promises()] == list(range(1, len(promises()) + 1))
    for line in promises():
        tests = [link for link in _LINK.findall(line) if "tests/promises/" in link]
        assert tests, line
        assert all((GUARANTEES.parent / link).resolve().exists() for link in tests), line


def test_every_test_of_a_promise_is_named_on_the_page() -> None:
    linked = {Path(link).name for line in promises() for link in _LINK.findall(line) if "tests/promises/" in link}
    assert {test.name for test in (ROOT / "tests/promises").glob("test_*.py")} == linked


# faults


def test_every_fault_has_a_row_that_names_tests_which_exist() -> None:
    page = ROOT / "docs/faults.md"
    rows = table_after(page, "faults")
    assert [int(number) for number, *_ in rows] == list(range(1, 43))
    for number, _, _, proof in rows:
        tests = re.findall(r"\[`(test_\w+)`\]\(([^)]+)\)", proof)
        assert tests or proof.startswith("comes "), f"fault {number} has no test and does not say when it comes"
        for name, link in tests:
            text = (page.parent / link).read_text()
            assert re.search(rf"^def {name}\(", text, re.MULTILINE), f"fault {number} names {name}, which is not there"


# tables


def table_after(page: Path, marker: str) -> list[list[str]]:
    """Return the cells of the table that follows a marker, without its head."""
    text = page.read_text().partition(f"<!-- {marker} -->")[2].lstrip()
    lines = text.partition("\n\n")[0].splitlines()
    assert lines, f"{name_of(page)} has no table marked {marker}"
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_table_of_stores_says_what_the_stores_say(workshop: Path, postgres_url: str) -> None:
    async def facts_of(url: str) -> Capabilities:
        app = App(url)
        await app.migrate()
        async with app:
            return app.store.capabilities

    for name, *said in table_after(GUARANTEES, "capabilities"):
        url = postgres_url if name.startswith("`postgresql") else name.strip("`").replace("…", "shop.db")
        facts = asyncio.run(facts_of(url))
        yes = ["yes" if fact else "no" for fact in (facts.transactional, facts.shared, facts.notifies)]
        assert said == [*yes, facts.durability], name


def test_the_table_of_transports_says_what_the_transports_say(redis_program: Path) -> None:
    async def facts_of(url: str) -> TransportCapabilities:
        transport = RedisTransport(url, allow_volatile=True)
        await transport.open()
        await transport.close()
        return transport.capabilities

    rows = table_after(GUARANTEES, "transports")
    assert rows
    for name, *said in rows:
        (setting,) = re.findall(r"`(append\w+) (\w+)`", name)
        with RedisServer(redis_program, settings={**DURABLE, setting[0]: setting[1]}) as server:
            facts = asyncio.run(facts_of(server.url()))
        yes = ["yes" if fact else "no" for fact in (facts.native_deduplication, facts.native_retrial, facts.ordered)]
        assert said == [*yes, facts.durability], name


def test_the_table_of_defaults_says_what_the_limits_are() -> None:
    for _, default, constant, _ in table_after(ROOT / "docs/reference/configuration.md", "defaults"):
        assert default == written(getattr(limits, constant.strip("`")), default), constant


def test_the_table_of_windows_says_what_the_limits_are() -> None:
    for _, length, constant in table_after(GUARANTEES, "windows"):
        assert length == written(getattr(limits, constant.strip("`")), length), constant


def written(value: float, like: str) -> str:
    """Format a number the way the page does."""
    unit = like.rpartition(" ")[2]
    size = {"days": 86_400, "day": 86_400, "hours": 3_600, "hour": 3_600, "minutes": 60, "minute": 60, "s": 1}.get(unit)
    return (
        f"{value:,g}" if size is None and value < 1_000_000 else f"{value / (size or 1):,.0f}" + f" {unit}" * bool(size)
    )


def test_the_table_of_moves_says_what_the_code_allows() -> None:
    said = {
        (None if before == "–" else before, after): by
        for before, after, by, *_ in table_after(ROOT / "ARCHITECTURE.md", "moves")
    }
    assert said == {
        (None if before is None else before.name.lower(), after.name.lower()): by
        for (before, after), by in MOVES.items()
    }


PACKAGE = ROOT / "src/onefold"


def _exists(name: str) -> bool:
    """Whether a path exists in the repository or in the package, or a bare file name anywhere in the package."""
    if (ROOT / name).exists() or (PACKAGE / name).exists():
        return True
    return "/" not in name.rstrip("/") and any(PACKAGE.rglob(name.rstrip("/")))


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_every_path_that_a_page_names_is_there(page: str) -> None:
    text = (ROOT / page).read_text()
    named = set(re.findall(r"`([\w./-]+(?:\.py|\.sql|/))`", text)) - {"NNNN_name.sql"}
    assert len(named) > 30
    assert sorted(name for name in named if not _exists(name)) == []


def test_the_architecture_names_every_package_and_every_module_on_the_ground() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    packages = [path.parent.relative_to(PACKAGE) for path in PACKAGE.glob("*/__init__.py")]
    assert [f"{path}/" for path in packages if f"`{path}/`" not in text] == []
    modules = [path.name for path in PACKAGE.glob("*.py") if not path.name.startswith("__")]
    assert [name for name in modules if f"`{name}`" not in text] == []


def test_the_picture_of_the_packages_is_the_import_contract() -> None:
    """The layers of the contract, from top to bottom, are the boxes of the first picture, in order."""
    layers = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]["layers"]
    names = [name.strip() for layer in layers for name in layer.split("|")]
    picture = (ROOT / "ARCHITECTURE.md").read_text().partition("```mermaid")[2].partition("```")[0]
    drawn = re.findall(r'^ +(\w+)\["', picture, re.MULTILINE)
    ground = {path.stem for path in PACKAGE.glob("*.py")} - {"registry"}
    assert drawn[:-1] == [name for name in names if name not in ground]


def test_the_calls_that_the_architecture_names_are_those_of_the_protocols() -> None:
    flow = (ROOT / "ARCHITECTURE.md").read_text().partition("| stage | module | call |")[2].partition("\n\n")[0]
    calls = {call for row in flow.splitlines()[2:] for call in re.findall(r"`(\w+)`", row.split("|")[3])}
    assert {"put", "claim", "settle", "publish"} <= calls
    offered = set(dir(Store)) | set(dir(Transaction)) | set(dir(Transport))
    assert sorted(calls - offered) == []


def test_every_error_has_its_paragraph_and_no_other_has() -> None:
    described = set(re.findall(r"^### `(\w+)`$", (ROOT / "docs/errors.md").read_text(), re.MULTILINE))
    raised = {
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, Exception) and kind.__module__ == errors.__name__
    }
    assert described == raised


def test_the_schema_page_names_every_table_and_column(tmp_path: Path) -> None:
    text = (ROOT / "docs/reference/schema.md").read_text()
    url = f"sqlite:///{tmp_path}/shop.db"
    asyncio.run(App(url).migrate())
    connection = apsw.Connection(f"{tmp_path}/shop.db")
    for (table,) in connection.execute("SELECT name FROM sqlite_schema WHERE type IN ('table', 'view')").fetchall():
        heading = f"## `{table.removeprefix('onefold_')}`"
        assert heading in text, table
        section = text.partition(heading)[2].partition("\n## ")[0]
        columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
        assert [column for column in columns if f"`{column}`" not in section] == [], table
    connection.close()


def test_every_decision_has_its_four_parts() -> None:
    records = sorted((ROOT / "docs/decisions").glob("0*.md"))
    numbers = [int(record.name[:4]) for record in records]
    # Each number is used once; records that are written at the same time may leave a gap for one another.
    assert numbers == sorted(set(numbers))
    for record in records:
        assert re.findall(r"^## (.+)$", record.read_text(), re.MULTILINE) == [
            "Context",
            "Decision",
            "Consequences",
            "What would make us change it",
        ], record.name
