"""What people read: one table, then the settings it was taken with."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from benchmarks import loop, raw_postgres, raw_sqlite, workloads
from benchmarks.bars import RAW, Workload, verdict
from benchmarks.contenders import OURS
from benchmarks.suite import Results, Scale

_COLOURS = {"reached": "green", "tie": "yellow", "missed": "red"}


def show(console: Console, everything: Sequence[Results], rows: Sequence[Workload]) -> None:
    """Print the table, then what went wrong."""
    table = Table(title="messages per second", box=None, padding=(0, 1, 0, 0))
    for heading in ("", "store"):
        table.add_column(heading, no_wrap=True)
    for heading in ("onefold", "raw", "ratio", "bar"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for row in rows:
        for results in everything:
            table.add_row(f"{row.code} {row.title}", results.store, *_cells(row, results))
    console.print(table)
    for line in _failures(everything):
        console.print(line, style="red", markup=False)


def _failures(everything: Sequence[Results]) -> list[str]:
    """Say each reason once, with the rows it spoiled."""
    spoiled: dict[tuple[str, str, str], list[str]] = {}
    for results in everything:
        for (code, name), error in results.errors.items():
            spoiled.setdefault((results.store, name, error), []).append(code)
    return [f"{store} {name} {' '.join(codes)}: {error}" for (store, name, error), codes in spoiled.items()]


def _cells(row: Workload, results: Results) -> list[str]:
    bar = results.bar(row.code)
    ratio = results.ratio(row.code, bar)
    said = "not measured" if ratio is None else verdict(ratio, bar)
    colour = _COLOURS.get(said.split()[0], "dim")
    return [
        _number(results.rate(row.code, OURS)),
        _number(results.rate(row.code, RAW)),
        "" if ratio is None else f"{ratio:.2f}",
        f"{bar.least:.2f} {bar.against}{'*' if bar.remark else ' '}",
        f"[{colour}]{said}[/]",
    ]


def _number(rate: float | None) -> str:
    return "" if rate is None else f"{rate:,.0f}"


def show_settings(console: Console, everything: Sequence[Results], scale: Scale, engines: Sequence[str]) -> None:
    """Print what a reader needs to take the run again."""
    remarks = sorted(
        {f"* {code}: {bar.remark}" for r in everything for code, _ in r.rates if (bar := r.bar(code)).remark}
    )
    lines = [
        *remarks,
        f"median of {scale.rounds}; ratio: median of the rounds' ratios; S1, S4 as a bar: our own figure there",
        f"payload about 100 bytes, every message keyed; bulk: {workloads.BULK} per commit; "
        f"raw claims {raw_sqlite.CLAIM} (SQLite) and {raw_postgres.CLAIM} (PostgreSQL) at once, "
        f"S6 on PostgreSQL over {raw_postgres.CONNECTIONS} connections",
        f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()} {platform.release()}, "
        f"Python {platform.python_version()}, {loop.NAME}",
        *engines,
    ]
    for line in lines:
        console.print(line, style="dim", highlight=False)
