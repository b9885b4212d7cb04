"""The calls that a program must have made, given the decisions in its journal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from onefold.testing.programs.description import Act, Ask, Block, Nest, Sleep, Tell
from onefold.testing.programs.walking import Seen, told, walk
from onefold.testing.world.story import Story


@dataclass(frozen=True, slots=True)
class Expected:
    """One call that the program made."""

    place: str
    #: The style of an action, or how a message was sent.
    how: str
    answer: Any
    #: The decisions taken before it.
    seen: str


class Reference:
    """Follows a program through a journal; ``acts`` are the calls it made, ``seen`` its decisions."""

    def __init__(self, program: Block, story: Story) -> None:
        self._story = story
        self._branch = ""
        self._ordinals: Counter[str] = Counter()
        self.seen: Seen = {}
        self.acts: list[Expected] = []
        _run_through(walk(program, self.seen, self))

    def _says(self, what: str) -> Any:
        what = f"{self._branch}{what}"
        self._ordinals[what] += 1
        return self._story.says(f"{what}#{self._ordinals[what]}")

    async def act(self, node: Act, place: str, seen: Seen) -> Any:
        answer = self._says("leaf" if node.style == "child" else f"a{node.n}")
        self.acts.append(Expected(place, node.style, answer, told(seen)))
        return answer

    async def ask(self, node: Ask, place: str) -> Any:
        return self._says("now" if node.what == "now" else f"go{node.n}")

    async def nest(self, node: Nest, place: str) -> Any:
        return self._says("nested")

    async def sleep(self, node: Sleep) -> None:
        pass

    async def both(self, branches: Sequence[Awaitable[None]]) -> None:
        here = self._branch
        self._ordinals[f"{here}gather"] += 1
        name = f"{here}gather#{self._ordinals[f'{here}gather']}."
        for number, branch in enumerate(branches):
            self._branch = f"{name}{number}/"
            await branch
        self._branch = here

    def tell(self, node: Tell, place: str, seen: Seen) -> None:
        self.acts.append(Expected(place, node.how, None, told(seen)))


def _run_through(walking: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that never suspends."""
    try:
        walking.send(None)
    except StopIteration:
        return
    raise AssertionError("a reference waits for nothing")
