"""The command line: ``python -m benchmarks [--quick] [--store sqlite] [--only S1 S4]``."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.bars import WORKLOADS, Workload
from benchmarks.engines import Engine, Postgres, SQLite
from benchmarks.loop import run
from benchmarks.report import show, show_settings
from benchmarks.suite import FULL, QUICK, Results, Scale, Suite, measures

_STORES: dict[str, Callable[[Path], Engine]] = {"sqlite": SQLite, "postgres": lambda _: Postgres()}


def main() -> None:
    options = _read_options()
    scale: Scale = QUICK if options.quick else FULL
    if options.rounds:
        scale = replace(scale, rounds=options.rounds)
    workloads = [workload for workload in WORKLOADS if workload.code in options.only]
    console = Console()
    with ExitStack() as stack:
        temporary = tempfile.TemporaryDirectory(prefix="onefold-bench-", dir=options.directory)
        directory = Path(stack.enter_context(temporary))
        # What the library leaves in the directory for temporary files goes with the benchmark's own.
        stack.callback(setattr, tempfile, "tempdir", tempfile.tempdir)
        tempfile.tempdir = str(directory)
        engines = [stack.enter_context(_STORES[name](directory)) for name in options.store]
        everything = _measure(console, engines, directory, scale, workloads)
        show(console, everything, workloads)
        show_settings(console, everything, scale, [engine.settings() for engine in engines])


def _read_options() -> argparse.Namespace:
    codes = [workload.code for workload in WORKLOADS]
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="onefold beside the raw engine")
    parser.add_argument("--quick", action="store_true", help="one short round: a look, not a measurement")
    parser.add_argument("--store", nargs="+", choices=list(_STORES), default=list(_STORES))
    parser.add_argument("--only", nargs="+", choices=codes, default=codes, metavar="S1", help="only these rows")
    parser.add_argument("--rounds", type=int, help="rounds instead of five (or one, with --quick)")
    parser.add_argument("--directory", type=Path, help="put the SQLite files on this disk")
    return parser.parse_args()


def _measure(
    console: Console, engines: list[Engine], directory: Path, scale: Scale, workloads: list[Workload]
) -> list[Results]:
    columns = (TextColumn("{task.description:30}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Drawn between measures only: a thread that draws meanwhile would take its time from what is measured.
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as progress:
        row = progress.add_task("", total=measures(scale, len(engines), workloads))

        def advance(description: str) -> None:
            progress.update(row, description=description)
            progress.refresh()
            progress.advance(row)

        return [run(Suite(engine, directory, scale, advance).run(workloads)) for engine in engines]


if __name__ == "__main__":
    main()
