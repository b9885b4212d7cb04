"""The page of neighbours and physical costs: tables with a line for each kind of noise, and for each cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from benchmarks.bars import ABSOLUTE
from benchmarks.contenders import OURS, RAW
from benchmarks.measures.neighbours import BYTES, COMMITS, DRAIN, DUE, SEND, row_of
from benchmarks.noise import ALONE, NOISES, Noise
from benchmarks.peers import PEERS
from benchmarks.plan import NEIGHBOURS, Row, Workload, rows_of
from benchmarks.report import number
from benchmarks.results import Comparison, Results

_HEAD = """\
# Neighbours and physical costs

How long a message takes beside very many others, and what it costs the engine, taken on {date} in one run.
`make bench` writes this page; `make bench-quick` takes a look with a twentieth of the messages and writes nothing.
Speed beside the raw engines and the peers is on [another page](results.md).

## How to read it

Each kind of noise has a store, a sender and workers of its own, and is made of copies of messages that onefold stored.
The worker knows plain tasks, which are measured, and tasks at each kind of gate.

- *Latency* is the median of single sends, from the call of `send` until the message is done, beside an idle worker.
- *Drain* is the rate of plain messages from a new worker's first claim until all are settled, the median of several.
- *Due one* is the latency of a message that may run, of the task whose gates are full of noise.
- *p90 of sends* is that of calls of `send` for plain messages from another process than the worker's.
- *Commits* and *bytes* are those of an idle worker to the engine's log.

A *ratio* is to the median of the same measure without noise (N0), taken before, in the middle and after.
Bars: latencies at most 1.5 times as long, drains at least 0.7 times as fast, sends at most twice as long, no commits;
a miss by less than 10 % is a tie.
"""

_COSTS = """\
## How to read the costs

They are per message and do not depend on how busy the machine is.
On PostgreSQL *bytes* are those of its write-ahead log, without automatic vacuum and soon after a checkpoint.
On SQLite they are those that the process writes, first to the log and then to the database; a page is 4,120 of them.
C1 to C3 have payloads of about 100 bytes, C4 the smallest messages there are, which the bars were set with.
"""

_NOISE_TABLE = ("", "beside", "latency, ms", "ratio", "drain, /s", "ratio", "verdict")
_GATE_TABLE = (
    *("", "beside", "due one, ms", "N0", "ratio", "p90 of sends, ms", "N0", "ratio"),
    *("commits/s", "bytes/s", "verdict"),
)
_MOMENTS = ("before", "in the middle", "after")
#: The first columns of a table are text, and so is the last.
_TEXTS = 2

Cells = Sequence[str]


def render(everything: Sequence[Results], workloads: Sequence[Workload], settings: Sequence[str]) -> str:
    """Return the page."""
    codes = {workload.code for workload in workloads if workload.page == NEIGHBOURS}
    noises = [noise for noise in NOISES if noise.code in codes]
    costs = rows_of([workload for workload in workloads if workload.code.startswith("C")])
    text = [_HEAD.format(date=datetime.now(UTC).date().isoformat())]
    for results in everything:
        if noises:
            text += [f"## Beside noise, {results.store}", "", *_table(_NOISE_TABLE, _noise_lines(results, noises))]
        if gated := [noise for noise in noises if noise.gated]:
            text += [f"## At gates, {results.store}", "", *_table(_GATE_TABLE, _gate_lines(results, gated))]
    if costs:
        text.append(_COSTS)
    for results in everything:
        if rows := [row for row in costs if results.series(row.name)]:
            names = [name for name in (OURS, RAW, *PEERS) if any(results.figure(row.name, name) for row in rows)]
            heads = ("", "cost of a message", *names, "bar", "verdict")
            text += [f"## Physical costs, {results.store}", "", *_table(heads, _cost_lines(results, rows, names))]
    return "\n".join([*text, "## Machine and settings", "", *(f"- {setting}" for setting in settings), ""])


def _table(heads: Cells, lines: Iterator[Cells]) -> Iterator[str]:
    """Yield a table whose first two columns and last one are text, and an empty line."""
    for cells in (heads, ["---"] * _TEXTS + ["--:"] * (len(heads) - _TEXTS - 1) + ["---"], *lines):
        yield f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
    yield ""


def _noise_lines(results: Results, noises: Sequence[Noise]) -> Iterator[Cells]:
    latencies, drains = (results.rounds(row_of(ALONE, what)) for what in ("", DRAIN))
    for turn, moment in enumerate(_MOMENTS):
        figures = number(latencies.get(turn)), "", number(drains.get(turn)), ""
        yield ALONE, f"no noise, {moment}", *figures, "" if turn else results.reasons.get((ALONE, OURS), "")
    for noise in noises:
        rows = row_of(noise.code), row_of(noise.code, DRAIN)
        cells = [cell for row in rows for cell in (number(results.figure(row)), _ratio(results, row))]
        yield noise.code, noise.title, *cells, _verdict(results, rows)


def _gate_lines(results: Results, noises: Sequence[Noise]) -> Iterator[Cells]:
    for noise in noises:
        due, send, commits, size = (row_of(noise.code, what) for what in (DUE, SEND, COMMITS, BYTES))
        compared = ((due, row_of(ALONE, noise.gated)), (send, row_of(ALONE, SEND)))
        cells = [
            cell
            for row, alone in compared
            for cell in (number(results.figure(row)), number(results.figure(alone)), _ratio(results, row))
        ]
        idle = (number(results.figure(row)) for row in (commits, size))
        yield noise.code, f"{noise.title} ({noise.gated})", *cells, *idle, _verdict(results, (due, send, commits, size))


def _cost_lines(results: Results, rows: Sequence[Row], names: Sequence[str]) -> Iterator[Cells]:
    for row in rows:
        figures = (number(results.figure(row.name, name)) for name in names)
        absolute = next((one for one in results.compare(row.name) if one.against == ABSOLUTE), None)
        bar = "" if absolute is None or absolute.bar is None else str(absolute.bar)
        yield row.name.split()[0], f"{row.title}, {row.unit}", *figures, bar, _verdict(results, (row.name,))


def _compared(results: Results, row: str) -> Comparison:
    """Return the comparison with the same measure without noise, or with nothing."""
    return results.compare(row)[0]


def _ratio(results: Results, row: str) -> str:
    ratio = _compared(results, row).ratio
    return "" if ratio is None else f"{ratio:.2f}"


def _verdict(results: Results, rows: Sequence[str]) -> str:
    """Return one verdict for several figures: each miss with the figure that it is about."""
    said = {row: "; ".join(filter(None, (one.said for one in results.compare(row)))) for row in rows}
    misses = [
        f"{row.partition(' ')[2] or 'latency'}: {text}" for row, text in said.items() if text not in ("reached", "")
    ]
    if len(rows) == 1:
        return said[rows[0]]
    return "; ".join(misses) or "reached"
