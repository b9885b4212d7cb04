"""The picture of a run: per store, bars of messages per second in groups per workload, on a logarithmic scale."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from benchmarks.contenders import OURS, RAW
from benchmarks.peers import PEERS
from benchmarks.plan import Row, Workload
from benchmarks.results import Results

#: The workloads with messages per second of several contenders, not of the same one under two conditions.
_DRAWN = ("S1", "S2", "S3", "S4", "S5", "S6", "S7")
_WIDTH, _LEFT, _TOP = 1040, 60, 70
_PANEL, _GAP = 260, 80
_BAR, _SPACE = 28, 48
_STYLE = """
text { font: 12px sans-serif; fill: #333; } .title { font-size: 15px; font-weight: 600; } .small { font-size: 9px; }
line { stroke: #8884; }
@media (prefers-color-scheme: dark) { text { fill: #ddd; } }
"""
#: Ours stands out, the raw engine stays in the background.
_COLOURS = {OURS: "#2563eb", RAW: "#9ca3af"}
_OTHERS = ("#f59e0b", "#10b981", "#ef4444", "#8b5cf6", "#ec4899", "#14b8a6", "#84cc16", "#78716c")


def draw(everything: Sequence[Results], workloads: Sequence[Workload]) -> str:
    """Return the picture as SVG."""
    rows = [row for workload in workloads for row in workload.rows if workload.code in _DRAWN]
    names = list(dict.fromkeys([RAW, OURS, *(name for results in everything for name in _names(results, rows))]))
    others = [name for name in names if name not in _COLOURS]
    colours = {**_COLOURS, **{name: _OTHERS[n % len(_OTHERS)] for n, name in enumerate(others)}}
    height = _TOP + len(everything) * (_PANEL + _GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">',
        "<title>Messages per second of onefold, the raw engines and the peers</title>",
        f"<style>{_STYLE}</style>",
        *_legend(names, colours),
    ]
    for number, results in enumerate(everything):
        parts += _panel(results, rows, colours, _TOP + number * (_PANEL + _GAP))
    return "\n".join([*parts, "</svg>\n"])


def _names(results: Results, rows: Sequence[Row]) -> list[str]:
    contenders = {RAW, OURS, *PEERS}
    return [
        name
        for row in rows
        for name in results.series(row.name)
        if name in contenders and results.figure(row.name, name)
    ]


def _legend(names: Sequence[str], colours: dict[str, str]) -> Iterator[str]:
    for number, name in enumerate(names):
        x = _LEFT + number * (_WIDTH - _LEFT) // max(len(names), 9)
        yield _box(x, 12, 11, 11, colours[name])
        yield _text(x + 15, 22, name, anchor="start")


def _panel(results: Results, rows: Sequence[Row], colours: dict[str, str], top: int) -> Iterator[str]:
    groups = {row: {name: results.figure(row.name, name) or 0 for name in _names(results, [row])} for row in rows}
    figures = [figure for group in groups.values() for figure in group.values()]
    if not figures:
        return
    low, high = math.floor(math.log10(min(figures))), math.ceil(math.log10(max(figures)))
    bottom = top + _PANEL

    def height(figure: float) -> float:
        return _PANEL * (math.log10(figure) - low) / max(high - low, 1)

    yield _text(_LEFT, top - 14, f"{results.store}: messages per second", anchor="start", kind="title")
    for power in range(low, high + 1):
        y = bottom - height(10**power)
        yield f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield _text(_LEFT - 6, y + 4, f"{10**power:,}", anchor="end")
    x = float(_LEFT + _SPACE / 2)
    for row, group in groups.items():
        for name, figure in group.items():
            tall = height(figure)
            yield _box(x, bottom - tall, _BAR - 2, tall, colours[name])
            yield _text(x + _BAR / 2 - 1, bottom - tall - 3, _short(figure), kind="small")
            x += _BAR
        if group:
            middle = x - len(group) * _BAR / 2
            yield _text(middle, bottom + 16, row.name)
            yield _text(middle, bottom + 29, row.title, kind="small")
            x += _SPACE


def _box(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'


def _text(x: float, y: float, text: str, *, anchor: str = "middle", kind: str = "") -> str:
    style = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}>{escape(text)}</text>'


def _short(figure: float) -> str:
    if figure < 1_000:
        return f"{figure:.0f}"
    return f"{figure / 1_000:.{0 if figure >= 10_000 else 1}f}k"
