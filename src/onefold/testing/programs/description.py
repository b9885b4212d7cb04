"""The language of generated programs: data that a message can carry, with a number for everything that is done."""

from __future__ import annotations

from typing import Literal

import msgspec

#: Where an action takes effect, and how often it may be called for that.
#:
#: ``async`` and ``def`` call a provider that knows the call again by its key; ``once`` calls one that does not, with
#: nothing to ask; ``probed`` one that can be asked; ``kept`` one that forgets a key after a while.
#: ``sql`` writes a row with the step's record; ``command`` and ``child`` send a task that writes one.
Style = Literal["async", "def", "sql", "once", "probed", "kept", "command", "child"]


class Act(msgspec.Struct, frozen=True, tag="act", omit_defaults=True):
    """Take effect; if that fails for good, do what rescues it."""

    n: int
    style: Style
    timeout: float | None = None
    #: Done when it failed; in a saga, empty lets the saga fail.
    rescue: tuple[Node, ...] = ()
    #: In a saga, what takes it back: a function or a task.
    undo: Literal["function", "task", "never"] | None = None
    #: In a saga, whether it fails for good until a person has sent the saga back.
    doomed: bool = False


class Ask(msgspec.Struct, frozen=True, tag="ask", omit_defaults=True):
    """Ask for the time, or wait for a signal, and go one of two ways."""

    n: int
    what: Literal["now", "signal"]
    timeout: float | None = None
    yes: tuple[Node, ...] = ()
    no: tuple[Node, ...] = ()


class Choose(msgspec.Struct, frozen=True, tag="choose", omit_defaults=True):
    """Go one of two ways, depending on every decision so far."""

    n: int
    yes: tuple[Node, ...] = ()
    no: tuple[Node, ...] = ()


class Sleep(msgspec.Struct, frozen=True, tag="sleep"):
    """Wait."""

    n: int
    seconds: float


class Both(msgspec.Struct, frozen=True, tag="both"):
    """Do several things at once."""

    n: int
    branches: tuple[tuple[Node, ...], ...]


class Repeat(msgspec.Struct, frozen=True, tag="repeat"):
    """Do something several times."""

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
    """Return a program as a message carries it."""
    return _encode(program).decode()


def read(text: str) -> Block:
    """Return the program that a message carries."""
    return _decode(text)


def signals_of(block: Block, times: int = 1) -> dict[int, int]:
    """Return for which signals a program may wait, by the number of the wait, and how often."""
    found: dict[int, int] = {}
    for node in block:
        if isinstance(node, Ask) and node.what == "signal":
            found[node.n] = times
        inner = times * node.times if isinstance(node, Repeat) else times
        for part in parts_of(node):
            found |= signals_of(part, inner)
    return found


def parts_of(node: Node) -> tuple[Block, ...]:
    """Return the blocks inside a node that the same run goes through."""
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
