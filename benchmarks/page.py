"""The record of a run: pages for readers, a picture, and the figures of every round."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from benchmarks import neighbours_page
from benchmarks.plan import NEIGHBOURS, RESULTS, Workload, rows_of
from benchmarks.plot import draw
from benchmarks.processes import ROOT
from benchmarks.report import lines
from benchmarks.results import Results

DIRECTORY = ROOT / "docs" / "benchmarks"

_HEAD = """\
# Benchmarks

onefold beside the raw engines and its peers, taken on {date} in one run on one machine.
`make bench` writes this page; `make bench-quick` takes a short look at the same and writes nothing.
Latency beside very many other messages, and physical costs, are on [another page](neighbours.md).

![Messages per second](results.svg)

## How to read it

Absolute figures change from machine to machine and from minute to minute, so what counts is the **ratio**:
the contenders take turns within each round, and a ratio is the median of the rounds' ratios.
*Raw* is a hand-written loop on the same engine that leases a batch and deletes it, with no promise beyond that.
A *bar* is what must be reached, an *aim* where we want to be; a miss by less than 10 % is a tie.
Where the unit is a time or a size, less is better.
Every worker writes down which message it ran, and a measure in which one was missed or ran twice counts as failed.
onefold runs with all that it promises: envelopes checked both ways, a unique key, a fence, the result kept.
The peers do less per message; each has its documented fast configuration.
"""

_LIMITS = """\
## What stands between a figure and its aim

- S1: every send is a commit of its own, so the disk's rate of syncs is the limit; S2 shows what sharing commits gives.
  On SQLite a message is nearly four pages in the log where raw writes two, about 8 µs each, and some 28 µs of Python,
  which runs cold behind each sync, where raw has 11.
- S3: onefold writes a message, its key and its delivery under unique indexes; raw and the peers write one row.
  On PostgreSQL a message costs the server 8.4 µs and the sender 6.9, most of it at the same time.
- S4, S5: a message is decoded, checked against its types, run, and its outcome kept; worker and server share the cores.
- S6, S7: one commit per message or step; the limit is the disk's, or how many commits the engine groups.
- S8: a commit, a wake-up, a claim with a commit of its own, then the handler: two syncs lie between send and start.
- S11: a failure costs about three plain messages: a line in the log, a row with its stack, and a new due time.
- S10, S12: the claim reads the index of what is due; what ended lies in other tables, and dead rows wait for cleaning.
"""


def write(
    everything: Sequence[Results], workloads: Sequence[Workload], settings: Mapping[str, Sequence[str]]
) -> list[Path]:
    """Write the pages of these workloads, with the settings of each, the picture and the figures; return the paths."""
    contents: dict[str, str] = {}
    pages = {page: [workload for workload in workloads if workload.page == page] for page in (RESULTS, NEIGHBOURS)}
    if those := pages[RESULTS]:
        contents["results.md"] = render(everything, those, settings[RESULTS])
        contents["results.svg"] = draw(everything, those)
        contents["results.json"] = _record(everything, those)
    if those := pages[NEIGHBOURS]:
        contents["neighbours.md"] = neighbours_page.render(everything, those, settings[NEIGHBOURS])
        contents["neighbours.json"] = _record(everything, those)
    DIRECTORY.mkdir(exist_ok=True)
    for name, text in contents.items():
        (DIRECTORY / name).write_text(text)
    return [(DIRECTORY / name).relative_to(ROOT) for name in contents]


def render(everything: Sequence[Results], workloads: Sequence[Workload], settings: Sequence[str]) -> str:
    """Return the page."""
    tables = [text for results in everything for text in _table(results, workloads)]
    facts = ["## Machine and settings", "", *(f"- {setting}" for setting in settings), ""]
    head = _HEAD.format(date=datetime.now(UTC).date().isoformat())
    return "\n".join([head, *tables, *facts, _LIMITS])


def _table(results: Results, workloads: Sequence[Workload]) -> Iterator[str]:
    yield from (f"## {results.store}", "", "| workload | onefold | beside | figure | ratio | bar | verdict |")
    yield "|---|--:|---|--:|--:|---|---|"
    for title, _, *cells in lines([results], workloads):
        yield f"| {' | '.join(cell.replace('|', '/') for cell in (title, *cells))} |"
    yield ""


def _record(everything: Sequence[Results], workloads: Sequence[Workload]) -> str:
    rows = {row.name for row in rows_of(workloads)}
    return json.dumps([_figures(results, rows) for results in everything], indent=1) + "\n"


def _figures(results: Results, rows: Collection[str]) -> dict[str, object]:
    return {
        "store": results.store,
        "figures": [
            {"row": row, "series": name, "rounds": [round(figure, 3) for figure in figures.values()]}
            for (row, name), figures in results.figures.items()
            if row in rows
        ],
        "reasons": [
            {"row": row, "series": name, "said": said} for (row, name), said in results.reasons.items() if row in rows
        ],
    }
