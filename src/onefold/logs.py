"""Beside the flow: the one place through which everything goes that onefold logs.

A log line is ``event name=value name=value``, and its values come from anywhere: keys and subjects from senders, error
texts from handlers, servers and drivers.  Here every value is made harmless, whichever module logs it:

- text that could end a line, pass for another field or steer a terminal is quoted and escaped;
- of an exception only its type is kept, because its text may hold what a handler was given.  The text of an error that
  onefold itself words about its store, its brokers or its configuration is kept, since it tells what to do;
- of a traceback the places and the types are kept.

A record carries the same as data, for formatters that write JSON: ``event`` is its name, and ``fields`` has the values
by their names, unquoted, with the same texts left out.

The whole text of a failure is in the store, with the attempt and the dead letter.
"""

from __future__ import annotations

import json
import logging
import re
import traceback
from functools import lru_cache
from typing import Any

from onefold.errors import ConfigurationError, LeaseLostError, StoreUnavailableError, TransportError

#: Errors whose text onefold words itself and that carry nothing of a message.
_WORDED = (ConfigurationError, LeaseLostError, StoreUnavailableError, TransportError)
#: Characters that are printable and would still end a value or begin another field.
_ENDS_A_VALUE = frozenset(" \"'=\\`")
#: A value is cut here: a key has 512 bytes at most, and a longer error text is in the store.
_VALUE_MAX = 1_000


#: A value in the format of a line, with its name; the event itself may be a value, which has none.
_FIELD = re.compile(r"(?:(\w+)=)?%[.\d]*[sdf]")
#: Formats that are remembered; there are fewer in the package.
_FORMATS_MAX = 256


def escaped(text: str) -> str:
    """Return text as one value of a log line: as it is if that is safe, otherwise quoted, with escapes."""
    text = _cut(text)
    if not text.isprintable():
        return json.dumps(text)
    if not text or not _ENDS_A_VALUE.isdisjoint(text):
        return json.dumps(text, ensure_ascii=False)
    return text


def _cut(text: str) -> str:
    return text if len(text) <= _VALUE_MAX else f"{text[:_VALUE_MAX]}…"


def _told(value: object) -> int | float | str | None:
    """Return what is told of a value: of an error its type, and its text only if onefold words it."""
    if value is None or isinstance(value, int | float):
        return value
    if isinstance(value, BaseException):
        kind = type(value).__name__
        return _cut(f"{kind}: {value}") if isinstance(value, _WORDED) else kind
    return _cut(str(value))


@lru_cache(_FORMATS_MAX)
def _names(form: str) -> tuple[str, tuple[str | None, ...]]:
    """Return the event of a line's format, and the names of its values in their order."""
    return form.partition(" ")[0], tuple(found[1] for found in _FIELD.finditer(form))


def _describe(record: logging.LogRecord, told: tuple[int | float | str | None, ...]) -> None:
    """Give a record its event and its fields as data."""
    event, names = _names(str(record.msg))
    named = list(zip(names, told, strict=False))
    if named and named[0][0] is None and event == "%s":
        event = str(named[0][1])
    record.event = event
    record.fields = {name: value for name, value in named if name is not None}


def _places(error: BaseException | None) -> str:
    """Write a traceback without the texts of its exceptions."""
    parts: list[str] = []
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        kind = type(error)
        parts.append("".join(traceback.format_tb(error.__traceback__)) + f"{kind.__module__}.{kind.__qualname__}")
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "\nthe exception above led to the next:\n".join(reversed(parts))


class Escaping(logging.Filter):
    """Makes the values of a record harmless before any handler sees them."""

    def filter(self, record: logging.LogRecord) -> bool:
        arguments: Any = record.args
        told = tuple(map(_told, arguments)) if isinstance(arguments, tuple) else ()
        _describe(record, told)
        if told:
            record.args = tuple(escaped(one) if isinstance(one, str) else one for one in told)
        if isinstance(record.exc_info, tuple):
            record.exc_text, record.exc_info = _places(record.exc_info[1]), None
        return True


logging.getLogger("onefold").addFilter(Escaping("onefold"))
