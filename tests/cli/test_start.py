"""A command starts fast: it imports its own module only, and help imports none of them."""

from __future__ import annotations

import inspect
import resource
import statistics
import subprocess
import sys

import pytest
import typer

from onefold.cli.lazy_group import SUMMARIES
from onefold.cli.main import cli

#: Processor time of ``onefold --help``, of which Python, typer and rich take about two thirds.
_HELP_SECONDS_MAX = 0.25


def test_the_list_of_commands_has_the_summaries_of_the_commands() -> None:
    """P3: the first paragraph of each command's own help."""
    commands = typer.main.get_group(cli).commands
    found = {name: inspect.cleandoc(command.help or "").split("\n\n")[0] for name, command in commands.items()}
    assert {name: " ".join(text.split()) for name, text in found.items()} == {
        name: " ".join(text.split()) for name, text in SUMMARIES.items()
    }


def test_help_imports_no_command_and_a_command_only_its_own() -> None:
    """P3: what the other commands need is not there."""
    program = (
        "import sys\n"
        "from onefold.cli.entry import run_command\n"
        "from onefold.cli.main import cli\n"
        "code = run_command(cli, sys.argv[1:])\n"
        "names = {one.rpartition('.')[2] for one in sys.modules if one.startswith('onefold.cli.')}\n"
        "print(*sorted(names & set(%r)), 'asyncio' in sys.modules, file=sys.stderr)\n"
    ) % [*SUMMARIES]
    for arguments, expected in (([], "False"), (["--help"], "False"), (["version"], "version False")):
        done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60)
        assert done.stderr.splitlines()[-1] == expected, done.stderr


@pytest.mark.alone
def test_help_takes_less_than_a_quarter_of_a_second_of_processor_time() -> None:
    """P3: the median of five; processor time, so that other processes of the machine count little."""
    spent = statistics.median(_processor_seconds("--help") for _ in range(5))
    assert spent < _HELP_SECONDS_MAX, f"onefold --help took {spent:.3f} s of processor time"


def _processor_seconds(*arguments: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "onefold", *arguments], check=True, capture_output=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
