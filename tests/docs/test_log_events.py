"""Every event that is logged is explained."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "logs.md"
EVENT = re.compile(r"[a-z]+(?:_[a-z]+)*")
#: Texts for people, and not of onefold's own logger.
OTHERS = ROOT / "src" / "onefold" / "testing"


def texts(node: ast.expr) -> Iterator[str]:
    """Yield the texts that an argument may be."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.IfExp):
        yield from texts(node.body)
        yield from texts(node.orelse)
    elif isinstance(node, ast.BinOp):
        yield from texts(node.left)
    elif isinstance(node, ast.JoinedStr):
        yield from (one for part in node.values[:1] for one in texts(part))


def calls() -> Iterator[ast.Call]:
    """Yield all calls of the logger in the source."""
    for path in (ROOT / "src" / "onefold").rglob("*.py"):
        if OTHERS in path.parents:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id == "logger"
            ):
                yield node


def logged() -> set[str]:
    """Return the events of these calls."""
    events = set[str]()
    for call in calls():
        assert isinstance(call.func, ast.Attribute)
        arguments = call.args[1:] if call.func.attr == "log" else call.args
        first = [text for argument in arguments[:1] for text in texts(argument)]
        if any(text.startswith("%s") for text in first):
            first = [text for argument in arguments[1:2] for text in texts(argument)]
        events |= {found[0] for text in first if (found := EVENT.match(text))}
    return events


def explained() -> set[str]:
    """Return the events of the page."""
    rows = re.findall(r"^\| (`[^|]*) \|", PAGE.read_text(), flags=re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([a-z_]+)`", row)}


def test_every_event_is_explained_and_no_other() -> None:
    # The health server is given the function that it logs with.
    assert logged() | {"health_crowded"} == explained()
