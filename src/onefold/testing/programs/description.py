"""The language of generated programs: data that a message can carry, with a number for every node."""

from __future__ import annotations

from typing import Literal

import msgspec

#: Where an action takes effect, and what is known about repeated calls.
#:
#: ``async`` and ``def`` call a provider that recognises repeated calls by their key.  Three styles call it in
#: ``ctx.once``: ``once`` without keys or a way to ask, ``probed`` with a way to ask, ``kept`` with keys that expire.
#: ``sql`` writes a row with the step's record; ``command`` and ``child`` send a task that writes one.
Style = Literal["async", "def", "sql", "once", "probed", "kept", "command", "child"]


class Act(msgspec.Struct, frozen=True, tag="act", omit_defaults=True):
    """Take effect; after a permanent failure, run the rescue."""

    n: int
    style: Style
    timeout: float | None = None
    #: Run after the failure; in a saga, an empty one lets the saga fail.
    rescue: tuple[Node, ...] = ()
    #: In a saga, how it is undone: by a function or a task.
    undo: Literal["function", "task", "never"] | None = None
    #: In a saga, whether it fails for good until an operator has restarted the saga.
    doomed: bool = False


class Ask(msgspec.Struct, frozen=True, tag="ask", omit_defaults=True):
    """Ask for the time, or wait for a signal, and take one of two branches."""

    n: int
    what: Literal["now", "signal"]
    timeout: float | None = None
    yes: tuple[Node, ...] = ()
    no: tuple[Node, ...] = ()


class Choose(msgspec.Struct, frozen=True, tag="choose", omit_defaults=True):
    """Take one of two branches, depending on all decisions so far."""

    n: int
    yes: tuple[Node, ...] = ()
    no: tuple[Node, ...] = ()


class Sleep(msgspec.Struct, frozen=True, tag="sleep"):
    """Wait."""

    n: int
    seconds: float


class Both(msgspec.Struct, frozen=True, tag="both"):
    """Run several branches at once."""

    n: int
    branches: tuple[tuple[Node, ...], ...]


class Repeat(msgspec.Struct, frozen=True, tag="repeat"):
    """Run a block several times."""

    n: int
    times: int
    body: tuple[Node, ...]


class Tell(msgspec.Struct, frozen=True, tag="tell"):
    """Send a message or publish an event, and do not wait."""

    n: int
    how: Literal["send", "publish"]


class Nest(msgspec.Struct, frozen=True, tag="nest", omit_defaults=True):
    """Run another program as a child."""

    n: int
    body: tuple[Node, ...]
    rescue: tuple[Node, ...] = ()


Node = Act | Ask | Choose | Sleep | Both | Repeat | Tell | Nest
Block = tuple[Node, ...]

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Block).decode


def written(program: Block) -> str:
    """Encode a program for a message."""
    return _encode(program).decode()


def read(text: str) -> Block:
    """Decode the program of a message."""
    return _decode(text)


def signals_of(block: Block, times: int = 1) -> dict[int, int]:
    """Return the signals for which a program may wait: by the number of the wait, how often it waits."""
    found: dict[int, int] = {}
    for node in block:
        if isinstance(node, Ask) and node.what == "signal":
            found[node.n] = times
        inner = times * node.times if isinstance(node, Repeat) else times
        for part in parts_of(node):
            found |= signals_of(part, inner)
    return found


def parts_of(node: Node) -> tuple[Block, ...]:
    """Return the blocks inside a node that run as part of the same run, not of a child."""
    match node:
        case Act():
            return (node.rescue,)
        case Ask() | Choose():
            return (node.yes, node.no)
        case Both():
            return node.branches
        case Repeat():
            return (node.body,)
        case Nest():
            return (node.rescue,)
    return ()
