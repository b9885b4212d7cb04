"""The command line: ``python -m benchmarks [--quick] [--store sqlite] [--only S1 S4] [--peers none] [--write]``."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.engines import Engine, Postgres, SQLite
from benchmarks.environment import InstallError, install
from benchmarks.loop import run
from benchmarks.page import write
from benchmarks.peers import PEERS
from benchmarks.place import FULL, QUICK, Scale
from benchmarks.plan import WORKLOADS, Workload, chosen
from benchmarks.report import show
from benchmarks.results import Results
from benchmarks.settings import describe
from benchmarks.suite import Suite

#: The width of the output if it is not a terminal, so that rows of the table are not broken.
_WIDTH = 120
_STORES: dict[str, Callable[[Path], Engine]] = {"sqlite": SQLite, "postgres": Postgres}


def main() -> None:
    options = _read_options()
    scale: Scale = QUICK if options.quick else FULL
    if options.rounds:
        scale = replace(scale, rounds=options.rounds)
    workloads = chosen(options.only)
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    peers = _install(console, _wanted_peers(options.peers, options.store, workloads))
    with ExitStack() as stack:
        temporary = tempfile.TemporaryDirectory(prefix="onefold-bench-", dir=options.directory)
        directory = Path(stack.enter_context(temporary))
        engines = [stack.enter_context(_STORES[name](directory)) for name in options.store]
        suites = [Suite(engine, directory, scale, workloads, peers) for engine in engines]
        everything = _measure(console, suites)
        settings = describe(scale, engines, [name for name, reason in peers.items() if reason is None])
    pages = dict.fromkeys(workload.page for workload in workloads)
    show(console, everything, workloads, list(dict.fromkeys(line for page in pages for line in settings[page])))
    if options.write:
        for path in write(everything, workloads, settings):
            console.print(f"written: {path}", style="dim")


def _read_options() -> argparse.Namespace:
    codes = list(dict.fromkeys(workload.code for workload in WORKLOADS))
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="onefold beside raw engines and peers")
    parser.add_argument("--quick", action="store_true", help="one short round: a look, not a measurement")
    parser.add_argument("--store", nargs="+", choices=list(_STORES), default=list(_STORES))
    parser.add_argument("--only", nargs="+", choices=codes, default=codes, metavar="S1", help="only these workloads")
    parser.add_argument("--peers", nargs="+", choices=["none", "all", *PEERS], default=["all"], metavar="NAME")
    parser.add_argument("--rounds", type=int, help="rounds instead of five (or one, with --quick)")
    parser.add_argument("--directory", type=Path, help="put the SQLite files on this disk")
    parser.add_argument("--write", action="store_true", help="write the results to docs/benchmarks")
    return parser.parse_args()


def _wanted_peers(asked: Sequence[str], stores: Sequence[str], workloads: Sequence[Workload]) -> list[str]:
    """Return the peers that were asked for and take part in a workload."""
    chosen = set(PEERS) if "all" in asked else set(asked)
    busy = {name for workload in workloads for store in stores for name in workload.taking_part(store, chosen)}
    return [name for name in PEERS if name in busy]


def _install(console: Console, names: Sequence[str]) -> dict[str, str | None]:
    """Return, by peer, the reason why it cannot take part, or None."""
    peers: dict[str, str | None] = {}
    for name in names:
        with console.status(f"installing {name}"):
            try:
                install(PEERS[name])
            except InstallError as error:
                peers[name] = str(error)
            else:
                peers[name] = None
    return peers


def _measure(console: Console, suites: Sequence[Suite]) -> list[Results]:
    columns = (TextColumn("{task.description:32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Drawn between measures only: a drawing thread would take processor time from the measure.
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as progress:
        bar = progress.add_task("", total=sum(1 for suite in suites for _ in suite.turns()))

        def advance(description: str) -> None:
            progress.update(bar, description=description)
            progress.refresh()
            progress.advance(bar)

        return [run(suite.run(advance)) for suite in suites]


if __name__ == "__main__":
    main()
