"""The meaning of a program: the branches it takes, given the answers of its performer."""

from __future__ import annotations

import zlib
from collections.abc import Awaitable, Sequence
from typing import Any, Protocol

import msgspec

from onefold.testing.programs.description import Act, Ask, Block, Both, Choose, Nest, Node, Repeat, Sleep, Tell

#: Every decision so far, by the place where it was taken.
Seen = dict[str, Any]

#: Answers of actions and children that failed.
LOST = ("failed", "dead", "gone")

_encode = msgspec.json.Encoder(order="sorted").encode


class Performer(Protocol):
    """Performs the nodes of a program; each answer is a decision, which stays."""

    async def act(self, node: Act, place: str, seen: Seen) -> Any: ...

    async def ask(self, node: Ask, place: str) -> Any: ...

    async def nest(self, node: Nest, place: str) -> Any: ...

    async def sleep(self, node: Sleep) -> None: ...

    async def both(self, branches: Sequence[Awaitable[None]]) -> None: ...

    def tell(self, node: Tell, place: str, seen: Seen) -> None: ...


def told(seen: Seen) -> str:
    """Return the decisions so far as one text."""
    return _encode(seen).decode()


def _ways(node: Node, answer: Any, seen: Seen) -> Block:
    """Return the branch that follows an answer."""
    match node:
        case Ask(what="now"):
            return node.yes if answer % 2 == 0 else node.no
        case Ask():
            return node.no if answer is None else node.yes
        case Choose():
            return node.yes if zlib.crc32(_encode(seen)) % 2 == 0 else node.no
        case Act() | Nest():
            return node.rescue if answer in LOST else ()
    return ()


async def walk(block: Block, seen: Seen, performer: Performer, suffix: str = "") -> None:
    """Walk through a program; its decisions are added to ``seen``."""
    for node in block:
        place = f"{node.n}{suffix}"
        match node:
            case Act():
                seen[place] = await performer.act(node, place, dict(seen))
            case Ask():
                seen[place] = await performer.ask(node, place)
            case Nest():
                seen[place] = await performer.nest(node, place)
            case Sleep():
                await performer.sleep(node)
            case Tell():
                performer.tell(node, place, dict(seen))
            case Repeat():
                for number in range(node.times):
                    await walk(node.body, seen, performer, f"{suffix}.{number}")
            case Both():
                copies = [dict(seen) for _ in node.branches]
                ways = zip(node.branches, copies, strict=True)
                await performer.both([walk(branch, copy, performer, suffix) for branch, copy in ways])
                for copy in copies:
                    seen |= copy
        await walk(_ways(node, seen.get(place), seen), seen, performer, suffix)
