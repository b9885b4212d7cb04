"""The kinds of noise beside which plain messages are measured: very many other messages, as data.

Each kind is made of copies of messages that the library has stored; ``benchmarks.noisy`` makes those.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.contender import Mode
from benchmarks.engines import Engine
from benchmarks.filling import ALIVE, ENDED, Copies, copy_gates, copy_messages
from benchmarks.noisy import CAPPED, EXAMPLE_KEY, FAIR, ORDERED, QUEUES, RATED, SHUT, UNKNOWN, Example

#: The code of the measures without noise, which all others are compared with.
ALONE = "N0"

#: Types of which the worker knows none.
_TYPES = 297
#: Limited keys that let nothing through, and lines of which no message can run.
_KEYS, _LINES = 20_000, 50_000
#: So that copies are not all due at one instant, and those that are due are due already.
_SPREAD = {"due_at": "example.due_at - n"}
#: So that copies have not all ended at one instant: a purge removes the bodies of one instant together.
_SPREAD_ENDS = {column: f"example.{column} - n" for column in ("ended_at", "kept_until", "body_until")}


@dataclass(frozen=True, slots=True)
class Part:
    """Copies of one message, or with ``gates`` of the saved state of the gate that it came through."""

    example: Example
    messages: int = 0
    tables: Sequence[str] = ALIVE
    #: SQL for other values, by column; ``{keys}`` stands for the number of keys or lines.
    changed: Mapping[str, str] = field(default_factory=dict)
    gates: str = ""


@dataclass(frozen=True, slots=True)
class Noise:
    """One kind of noise."""

    code: str
    title: str
    #: The same in full, for readers of the page.
    about: str
    parts: tuple[Part, ...] = ()
    mode: Mode = Mode.NOISY
    #: Distinct keys or lines among the messages; fewer of them with ``--quick``, as of the messages.
    keys: int = 1
    #: The task at whose gates the noise waits; then a due message of it is measured too, and the writes of an idle
    #: worker.
    gated: str = ""

    def describe(self, share: float) -> str:
        """Return the kind with its size, of which ``share`` is made."""
        messages, keys = sum(part.messages for part in self.parts), max(round(share * self.keys), 1)
        return self.about.format(messages=f"{round(share * messages):,} messages", keys=f"{keys:,}")


def _of_type(message_type: str) -> dict[str, str]:
    return {"message_type": message_type, "scope": message_type}


NOISES = (
    Noise("N1", "due tomorrow", "{messages} due tomorrow", (Part(Example.LATER, 1_000_000, changed=_SPREAD),)),
    Noise(
        "N2",
        "other queue",
        "{messages} due in a queue that the worker does not serve",
        (Part(Example.ELSEWHERE, 500_000, changed=_SPREAD),),
    ),
    Noise(
        "N3",
        f"{QUEUES} queues",
        f"a worker that serves {QUEUES} queues, to which the plain messages are sent in turn",
        mode=Mode.QUEUES,
    ),
    Noise(
        "N4",
        "unknown types",
        f"{{messages}} due, of {_TYPES} types that the worker does not know",
        (Part(Example.UNKNOWN, 300_000, changed={**_SPREAD, **_of_type(f"'{UNKNOWN}-' || (n % {_TYPES})")}),),
    ),
    Noise(
        "N5", "parked", "{messages} parked for a signal", (Part(Example.PARKED, 200_000, (*ALIVE, "step"), _SPREAD),)
    ),
    Noise("N6", "dead", "{messages} dead", (Part(Example.DEAD, 200_000, (*ENDED, "attempt"), _SPREAD_ENDS),)),
    Noise("N7", "done", "{messages} done", (Part(Example.DONE, 1_000_000, ENDED, _SPREAD_ENDS),)),
    Noise(
        "N8",
        "back-off",
        "{messages} that failed once and wait for their next attempt",
        (Part(Example.BACKED_OFF, 100_000, (*ALIVE, "attempt"), _SPREAD),),
    ),
    Noise(
        "N9",
        "priorities",
        "{messages} with priorities, half due tomorrow and half due and of an unknown type",
        (
            Part(Example.LATER, 100_000, changed={**_SPREAD, "priority": "n % 10"}),
            Part(Example.UNKNOWN, 100_000, changed={**_SPREAD, "priority": "1 + n % 9"}),
        ),
    ),
    Noise(
        "N10",
        "lines",
        "{messages} in {keys} lines, half due tomorrow and half due and of an unknown type",
        (
            Part(Example.LINE, _LINES // 2, changed={**_SPREAD, "gate": f"'{ORDERED}:{SHUT}-' || n"}),
            Part(Example.UNKNOWN_LINE, _LINES // 2, changed={**_SPREAD, "gate": f"'{UNKNOWN}:{SHUT}-' || n"}),
        ),
        keys=_LINES,
        gated=ORDERED,
    ),
    Noise(
        "N11",
        "lines of another queue",
        "{messages} due in {keys} lines of a queue that the worker does not serve",
        (
            Part(
                Example.LINE_ELSEWHERE,
                200_000,
                changed={**_SPREAD, "gate": f"'{ORDERED}:{SHUT}-' || (n % {{keys}})", "place": "example.place + n"},
            ),
        ),
        keys=_LINES,
        gated=ORDERED,
    ),
    Noise(
        "N12",
        "fair keys",
        "{messages} at {keys} fair keys, due tomorrow",
        (Part(Example.FAIR, 200_000, changed={**_SPREAD, "gate": f"'{FAIR}:{SHUT}-' || (n % {{keys}})"}),),
        keys=_KEYS,
        gated=FAIR,
    ),
    Noise(
        "N13",
        "keys without a token",
        "{messages} due at {keys} keys whose rate has no token left",
        (
            Part(Example.RATED_SPENT, gates=f"'{RATED}:{SHUT}-' || n"),
            Part(Example.RATED, 200_000, changed={**_SPREAD, "gate": f"'{RATED}:{SHUT}-' || (n % {{keys}})"}),
        ),
        keys=_KEYS,
        gated=RATED,
    ),
    Noise(
        "N14",
        "keys without a place",
        "{messages} at {keys} keys of which each lets one run, which runs; the others are due",
        (
            # The first key is that of the example.
            Part(Example.CAPPED_RUNNING, _KEYS - 1, changed={"gate": f"'{CAPPED}:{SHUT}-' || n"}),
            Part(Example.CAPPED, 180_000, changed={**_SPREAD, "gate": f"'{CAPPED}:{SHUT}-' || (n % {{keys}})"}),
        ),
        keys=_KEYS,
        gated=CAPPED,
    ),
)


async def fill(
    engine: Engine,
    url: str,
    noise: Noise,
    share: float,
    example: Callable[[Example, int], Awaitable[str]],
    first: int = 1,
) -> None:
    """Make ``share`` of the noise; ``example`` stores a message with a number of its own and returns its id.

    Copies are numbered from ``first`` on, which tells them from other noise in the same store.
    """
    keys = max(round(share * noise.keys), 1)
    for number, part in enumerate(noise.parts, start=1):
        id_ = await example(part.example, -number)
        changed = {column: sql.format(keys=keys) for column, sql in part.changed.items()}
        if part.gates:
            copy_gates(engine, url, f"{noise.gated}:{EXAMPLE_KEY}", gates=keys - 1, name=part.gates)
        if part.messages:
            messages = round(share * part.messages)
            copy_messages(engine, url, Copies(id_, messages, part.tables, first, changed))
            first += messages
    engine.tidy(url)
