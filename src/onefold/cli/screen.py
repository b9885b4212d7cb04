"""Printing for all commands, which escapes every text, so that no text of a store can steer a terminal.

Task names, keys, subjects, error texts and worker names come from senders, handlers and servers.  Printed as they are,
they could move the cursor, set the title, be a link, hide or reorder characters, or look like a line of the command.
So every text is escaped here before the layout: control, formatting and invisible characters and line ends are shown
as ``\\x1b``, ``\\n`` or ``\\u202e``, and long texts are cut.  Markup is off; styles are given with ``line``.
"""

from __future__ import annotations

import json
import re
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.style import Style
from rich.table import Table
from rich.text import Text as Text

#: Columns of output that is not a terminal; wide enough for tables, because a program has no use for a cut id.
_PIPED_WIDTH = 240
#: Columns; wider than any line that is not wrapped.
_WIDE = 100_000
#: Characters of one text; a longer one is cut, and ``--json`` has the whole.
_TEXT_MAX = 2_000
#: Combining marks on one character; more would cover the lines above and below.
_MARKS_MAX = 3
#: Characters that are printable by their category, but invisible.
_INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)

#: A part of a line: a text, or a text and its style.
Part = str | tuple[str, str] | Text
#: A cell of a table.
Cell = str | Text


class OutputLostError(Exception):
    """Standard output cannot be written: its reader has closed it, or its disk is full."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"standard output cannot be written: {error.strerror or type(error).__name__}")
        self.reader_gone = isinstance(error, BrokenPipeError)


def harmless(text: str, most: int = _TEXT_MAX) -> str:
    """Return a text as one line, with control and invisible characters escaped."""
    cut = text if len(text) <= most else f"{text[: max(most - 1, 0)]}…"
    if cut.isascii() and cut.isprintable():
        return cut
    marks, parts = 0, list[str]()
    for character in cut:
        marks = marks + 1 if unicodedata.combining(character) else 0
        plain = character.isprintable() and marks <= _MARKS_MAX and not _INVISIBLE.match(character)
        parts.append(character if plain else character.encode("unicode_escape", "surrogatepass").decode("ascii"))
    return "".join(parts)


def line(*parts: Part) -> Text:
    """Return one line of harmless texts, some of them with a style."""
    made = Text()
    for part in parts:
        if isinstance(part, Text):
            made.append_text(part)
        else:
            text, style = (part, "") if isinstance(part, str) else part
            made.append(harmless(text), style)
    return made


def separated(by: str, *parts: Part) -> Text:
    """Return harmless texts with a separator between them."""
    return Text(by).join(line(part) for part in parts)


def lines(*parts: Part) -> Text:
    """Return several lines as one cell or label."""
    return separated("\n", *parts)


class Screen(Console):
    """A console that interprets no markup and escapes every text."""

    def __init__(self, *, stderr: bool = False) -> None:
        stream = sys.stderr if stderr else sys.stdout
        piped = not stderr and (stream is None or not stream.isatty())
        super().__init__(
            stderr=stderr, markup=False, emoji=False, highlight=False, width=_PIPED_WIDTH if piped else None
        )

    def render_str(self, text: str, *, style: str | Style = "", **_: Any) -> Text:
        """Escape a text before its layout; rich calls this for every text that is printed."""
        return Text(harmless(text), style)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print; raise ``OutputLostError`` if standard output cannot be written, and ignore it for standard error."""
        try:
            super().print(*objects, **options)
        except OSError as error:
            # Drop the buffered output, or rich would try to write it again with the next line.
            with suppress(OSError), self.capture():
                pass
            self._refuse(error)

    def on_broken_pipe(self) -> None:
        """Raise the error for ``print`` to handle, where rich would end the process."""
        raise

    def say(self, *parts: Part) -> None:
        """Print a line without wrapping it, so that it can be copied and searched."""
        self.print(line(*parts), soft_wrap=True)

    def print_json(self, answer: object) -> None:  # type: ignore[override]
        """Print JSON in ASCII, in which every character can be written and none steers a terminal."""
        import msgspec  # here, because importing it takes a tenth of the time of ``onefold --help``

        try:
            self.file.write(json.dumps(msgspec.to_builtins(answer)) + "\n")
            self.file.flush()
        except OSError as error:
            self._refuse(error)

    def print_table(self, headings: Sequence[str], rows: Iterable[Sequence[Cell]], *, title: str = "") -> None:
        """Print a table; on a terminal that is too narrow for its words, print one field per line."""
        table, kept = Table(*headings, box=None, padding=(0, 2, 0, 0)), list(rows)
        for row in kept:
            table.add_row(*row)
        if title:
            self.say((title, "italic"))
        if Measurement.get(self, self.options.update(width=_WIDE), table).minimum <= self.width:
            self.print(table)
            return
        for row in kept:
            for heading, cell in zip(headings, row, strict=True):
                text = line(cell)
                text.plain = text.plain.replace("\n", ", ")
                self.say((f"{heading}: " if heading else "", "bold"), text)
            self.print()

    def print_lines(self, text: str) -> None:
        """Print a text of several lines."""
        for one in text.splitlines():
            self.say(one)

    def print_fields(self, fields: Mapping[str, object]) -> None:
        """Print the fields of one thing, one per line, with inner ones indented."""
        for one in _field_lines(fields, ""):
            self.print(one, soft_wrap=True)

    def _refuse(self, error: OSError) -> None:
        if not self.stderr:
            raise OutputLostError(error) from error


def _field_lines(value: object, indent: str) -> Iterator[Text]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if isinstance(inner, str) and len(text := inner.splitlines()) > 1:
                # With a bar before each line, so that none looks like a field.
                inner = [f"| {one}" for one in text]
            if inner and isinstance(inner, Mapping | list):
                yield line(indent, (str(name), "bold"), ":")
                yield from _field_lines(inner, indent + "  ")
            else:
                yield line(indent, (str(name), "bold"), ": ", _scalar(inner))
    elif isinstance(value, list):
        for inner in value:
            if inner and isinstance(inner, Mapping | list):
                first, *rest = _field_lines(inner, "")
                yield line(f"{indent}- ", first)
                yield from (line(f"{indent}  ", one) for one in rest)
            else:
                yield line(indent, _scalar(inner))


def _scalar(value: object) -> str:
    if value is None or value == "":
        return "-"
    return value if isinstance(value, str) else json.dumps(value)


output = Screen()
errors = Screen(stderr=True)
