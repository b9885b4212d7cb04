"""The report in the terminal: one table, with a line for each figure that ours is compared with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.contenders import OURS
from benchmarks.plan import Row, Workload, rows_of
from benchmarks.results import Comparison, Results

_NONE = "–"
_COLOURS = {"reached": "green", "tie": "yellow", "missed": "red", "failed:": "red"}

#: Title, store, our figure, against, its figure, ratio, bar, verdict.
Line = tuple[str, str, str, str, str, str, str, str]
HEADINGS: Line = ("", "store", OURS, "beside", "", "ratio", "bar", "")


def lines(everything: Sequence[Results], workloads: Sequence[Workload]) -> Iterator[Line]:
    """Yield the report's lines; the terminal and the page show the same ones."""
    for row in rows_of(workloads):
        for results in everything:
            if results.series(row.name):
                yield from _lines_of(row, results)


def _lines_of(row: Row, results: Results) -> Iterator[Line]:
    ours = number(results.figure(row.name)) or _NONE
    beginning = (f"{row.name.split()[0]} {row.title}, {row.unit}", results.store, ours)
    said = ""
    for comparison in results.compare(row.name):
        # The reason for a missing figure of ours is shown once, not beside each of the others.
        yield (*beginning, *_cells(comparison), "" if ours == _NONE and comparison.said == said else comparison.said)
        beginning, said = ("", "", ""), comparison.said


def _cells(comparison: Comparison) -> tuple[str, str, str, str]:
    ratio = comparison.ratio
    return (
        comparison.against,
        number(comparison.figure),
        "" if ratio is None or comparison.figure is None else f"{ratio:.2f}",
        str(comparison.bar or ""),
    )


def number(figure: float | None) -> str:
    """Return a figure as text, with at least two digits; nothing for one that is missing."""
    if figure is None:
        return ""
    if 0 < figure < 0.1:
        return f"{figure:.2g}"
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.2f}"


def show(
    console: Console, everything: Sequence[Results], workloads: Sequence[Workload], settings: Sequence[str]
) -> None:
    """Print the table, then the settings that are needed to repeat the run."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for number, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="right" if number in (2, 4, 5) else "left", no_wrap=number != 7)
    for line in lines(everything, workloads):
        colour = _COLOURS.get(line[-1].partition(" ")[0], "dim")
        table.add_row(*(escape(cell) for cell in line[:-1]), f"[{colour}]{escape(line[-1])}[/]")
    console.print(table)
    for setting in settings:
        console.print(setting, style="dim", highlight=False, markup=False)
