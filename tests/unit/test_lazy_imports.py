"""Public names are imported when they are used, so that commands start quickly and parts work without their engines."""

from __future__ import annotations

import ast
import pkgutil
import subprocess
import sys
from pathlib import Path

import onefold

#: Imported by name with all of these missing: each is needed by one part only.
BLOCKED = ("apsw", "multiprocessing", "psycopg", "psycopg_pool", "redis", "rich", "typer", "uvloop")

_WITHOUT = f"""
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {BLOCKED}:
            raise ModuleNotFoundError(f"{{name}} is blocked", name=name)

sys.meta_path.insert(0, Blocked())
"""


def run(program: str) -> str:
    """Run a program in an interpreter of its own and return its output."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_all_public_names_import_without_databases_commands_and_processes() -> None:
    """P1: only opening a store, starting a command or a supervisor needs more than the core."""
    run(
        _WITHOUT + "import onefold, onefold.store, onefold.testing\nfor name in onefold.__all__: getattr(onefold, name)"
    )


def test_every_module_imports_without_what_other_parts_need() -> None:
    """P1: all but the commands, the engines, the transports and the proofs of onefold itself."""
    needing = ["cli", "store.sqlite", "store.postgres", "brokers.redis", "testing."]
    prefixes = tuple(f"onefold.{name}" for name in [*needing, "__main__"])
    names = [one.name for one in pkgutil.walk_packages(onefold.__path__, "onefold.")]
    modules = [name for name in names if not name.startswith(prefixes)]
    assert "onefold.app" in modules
    run(f"{_WITHOUT}import importlib\nfor name in {modules}: importlib.import_module(name)")


def test_importing_onefold_imports_no_part_of_it() -> None:
    """P1: a program that uses one name pays for that name."""
    loaded = run("import sys, onefold; print(*[name for name in sys.modules if name.startswith('onefold.')])").split()
    assert set(loaded) <= {"onefold.errors", "onefold.logs"}


def test_type_checkers_and_the_interpreter_are_told_the_same_modules() -> None:
    """P1: the imports for type checkers name each public name once, from the module that it is loaded from."""
    tree = ast.parse(Path(onefold.__file__).read_text())
    conditions = [node for node in tree.body if isinstance(node, ast.If)]
    (block,) = [node for node in conditions if ast.unparse(node.test) == "TYPE_CHECKING"]
    told = {name.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for name in node.names}
    assert told == onefold._MODULE_OF
    assert sorted(told) == sorted(onefold.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    """P3: as of any module."""
    done = subprocess.run(
        [sys.executable, "-c", "from onefold import Ap"], capture_output=True, text=True, timeout=60, check=False
    )
    assert "cannot import name 'Ap' from 'onefold'" in done.stderr
    assert "Ap" not in dir(onefold)
    assert "App" in dir(onefold)
