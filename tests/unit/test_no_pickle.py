"""The source contains neither code hidden in data nor statements built from strings."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import onefold

SOURCE = Path(onefold.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
BANNED_MODULES = {"pickle", "cPickle", "marshal", "shelve", "yaml", "dill", "cloudpickle", "jsonpickle"}
BANNED_CALLS = {"eval", "exec", "compile", "__import__"}
#: The functions by which statements reach a driver.
EXECUTES = {"execute", "executemany", "executescript", "copy"}


def trees() -> Iterator[tuple[str, ast.Module]]:
    for file in FILES:
        yield str(file.relative_to(SOURCE)), ast.parse(file.read_text())


def problems_in(tree: ast.Module) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in BANNED_MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in BANNED_MODULES:
            found.append(node.module or "")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BANNED_CALLS:
            found.append(node.func.id)
    return found


def test_nothing_that_runs_code_from_data_is_imported_or_called() -> None:
    """Fault 27: no pickle, no YAML, no eval, anywhere in the source."""
    assert len(FILES) > 20
    assert {name: found for name, tree in trees() if (found := problems_in(tree))} == {}


@pytest.mark.parametrize(
    "code", ["import pickle", "from marshal import loads", "import yaml.loader", "eval('1')", "x = exec(text)"]
)
def test_the_search_for_code_in_data_finds_it(code: str) -> None:
    """Fault 27: the check above can fail."""
    assert problems_in(ast.parse(code))


def built_statements(tree: ast.Module) -> list[str]:
    """Return the calls that execute a statement put together from strings."""
    found = []
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
            continue
        if node.func.attr in EXECUTES and is_built(node.args[0]):
            found.append(ast.unparse(node))
    return found


def is_built(statement: ast.expr) -> bool:
    if isinstance(statement, ast.JoinedStr):
        return True
    if isinstance(statement, ast.BinOp):
        return True
    return (
        isinstance(statement, ast.Call)
        and isinstance(statement.func, ast.Attribute)
        and statement.func.attr in ("format", "join", "replace", "format_map")
    )


#: Pragmas take no parameters; the store checks these values against a few words first, and names the pragmas it reads.
ALLOWED = {
    "connection.execute(f'PRAGMA synchronous = {synchronous}')",
    "connection.execute(f'PRAGMA journal_mode = {journal}')",
    "connection.execute(f'PRAGMA journal_size_limit = {LOG_BYTES_MAX}')",
    "self.execute(f'PRAGMA {name}')",
}


def test_no_statement_is_built_from_strings() -> None:
    """Faults 27 and 29: names and values reach the database as parameters only."""
    built = {call for name, tree in trees() if name.startswith("stores") for call in built_statements(tree)}
    assert built <= ALLOWED


@pytest.mark.parametrize(
    "code",
    [
        "c.execute(f'SELECT {x}')",
        "c.execute('SELECT %s' % x)",
        "c.execute('SELECT ' + x)",
        "c.executemany('SELECT {}'.format(x), rows)",
    ],
)
def test_the_search_for_built_statements_finds_them(code: str) -> None:
    """Fault 29: the check above can fail."""
    assert built_statements(ast.parse(code))


#: The literal statements that code may contain; all others are in queries.sql or in a migration.
LITERALS = ("PRAGMA ", "BEGIN", "COMMIT", "ROLLBACK", "SAVEPOINT", "RELEASE", "SET ", "SHOW ", "LISTEN", "UNLISTEN")


def literal_statements(tree: ast.Module) -> list[str]:
    calls = (n for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.args)
    return [
        first.value
        for call in calls
        if isinstance(call.func, ast.Attribute) and call.func.attr in EXECUTES
        if isinstance(first := call.args[0], ast.Constant) and isinstance(first.value, str)
    ]


def test_statements_in_the_code_only_steer_the_connection_or_read_the_schema() -> None:
    """Fault 29: other statements are in files, side by side for both stores."""
    strays = {
        (name, " ".join(statement.split()))
        for name, tree in trees()
        if name.startswith("stores")
        for statement in literal_statements(tree)
        if not statement.strip().upper().startswith(LITERALS)
    }
    assert {statement for _, statement in strays if not about_the_schema(statement)} == set()


def about_the_schema(statement: str) -> bool:
    schema = ("sqlite_schema", "onefold_migration", "onefold.migration", "pg_catalog", "information_schema", "pg_")
    return any(name in statement for name in schema)
