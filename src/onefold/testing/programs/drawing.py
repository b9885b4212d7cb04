"""Draws programs from a seed, small enough to be read when one of them finds a defect."""

from __future__ import annotations

import random

from onefold.testing.programs.description import Act, Ask, Block, Both, Choose, Nest, Node, Repeat, Sleep, Style, Tell

#: Weights of the nodes of a workflow; nodes with branches are drawn only at small depths.
_LEAVES = {"act": 8, "now": 3, "signal": 4, "sleep": 2, "tell": 2}
_BRANCHES = {"choose": 2, "both": 2, "repeat": 1, "nest": 1}
_STYLES: dict[Style, int] = {
    "async": 4, "def": 3, "sql": 2, "once": 1, "probed": 1, "kept": 3, "command": 2, "child": 2
}  # fmt: skip
_DEPTH_MAX = 2

#: How long a wait or an answer may take, in seconds; small beside the length of a simulated world.
_WAITS = (0.2, 0.5, 1.0)
#: The chance that a saga has a step that fails for good.
_DOOM = 0.5


class Drawing:
    """Draws programs; the nodes of one program are numbered."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._number = 0

    def workflow(self) -> Block:
        """Draw a workflow."""
        return self._block(self._chance.randint(2, 5), 0)

    def saga(self) -> Block:
        """Draw a saga, with the undos of its steps and sometimes with a step that is bound to fail."""
        chance = self._chance
        nodes: list[Node] = [self._saga_step() for _ in range(chance.randint(2, 4))]
        if chance.random() < 0.4:
            pair = ((self._saga_step(),), (self._saga_step(),))
            nodes.insert(chance.randint(0, len(nodes)), Both(self._next(), pair))
        for _ in range(chance.randint(0, 2)):
            nodes.insert(chance.randint(0, len(nodes)), Sleep(self._next(), chance.choice(_WAITS)))
        if chance.random() < 0.5:
            way = ((self._saga_step(),), (self._saga_step(),))
            nodes.insert(chance.randint(0, len(nodes)), Ask(self._next(), "now", None, *way))
        if chance.random() < _DOOM:
            doomed = Act(self._next(), "async", undo="never", doomed=True)
            nodes.insert(chance.randint(1, len(nodes)), doomed)
        return tuple(nodes)

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _block(self, length: int, depth: int) -> Block:
        return tuple(self._node(depth) for _ in range(length))

    def _part(self, depth: int) -> Block:
        """Draw a branch, which is sometimes empty and usually begins with an action."""
        if self._chance.random() < 0.1:
            return ()
        if self._chance.random() < 0.7:
            return (self._act(_DEPTH_MAX), *self._block(self._chance.randint(0, 1), depth))
        return self._block(self._chance.randint(1, 2), depth)

    def _node(self, depth: int) -> Node:
        chance, deeper = self._chance, depth + 1
        weights = _LEAVES if depth >= _DEPTH_MAX else _LEAVES | _BRANCHES
        (kind,) = chance.choices(list(weights), list(weights.values()))
        n = self._next()
        match kind:
            case "act":
                return self._act(depth, n)
            case "now":
                return Ask(n, "now", None, self._part(deeper), self._part(deeper))
            case "signal":
                timeout = None if chance.random() < 0.1 else chance.choice(_WAITS)
                return Ask(n, "signal", timeout, self._part(deeper), self._part(deeper))
            case "sleep":
                return Sleep(n, chance.choice(_WAITS))
            case "tell":
                return Tell(n, chance.choice(["send", "publish"]))
            case "choose":
                return Choose(n, self._part(deeper), self._part(deeper))
            case "both":
                return Both(n, tuple(self._part(deeper) for _ in range(chance.randint(2, 3))))
            case "repeat":
                return Repeat(n, chance.randint(2, 3), self._block(chance.randint(1, 2), _DEPTH_MAX))
            case _:
                return Nest(n, self._block(chance.randint(1, 2), _DEPTH_MAX), self._part(_DEPTH_MAX))

    def _act(self, depth: int, n: int | None = None) -> Act:
        chance = self._chance
        (style,) = chance.choices(list(_STYLES), list(_STYLES.values()))
        # A late plain function cannot be stopped, so with a timeout two calls of it could run at once.
        timed = style in ("async", "sql", "command") and chance.random() < 0.4
        rescue = self._part(depth + 1) if depth < _DEPTH_MAX else (Act(self._next(), "async"),)
        return Act(self._next() if n is None else n, style, chance.choice(_WAITS) if timed else None, rescue)

    def _saga_step(self) -> Act:
        chance = self._chance
        style: Style = chance.choice(["async", "async", "def", "sql", "command"])
        if chance.random() < 0.1:
            return Act(self._next(), style, undo="never")
        # An effect at the provider is undone there; a row may be undone by any message.
        by_task = style in ("sql", "command") and chance.random() < 0.6
        timed = style in ("async", "sql", "command") and chance.random() < 0.3
        timeout = chance.choice(_WAITS) if timed else None
        return Act(self._next(), style, timeout, undo="task" if by_task else "function")
