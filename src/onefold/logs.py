"""Beside the flow: a filter through which every log record of onefold goes.

A log line is ``event name=value name=value``.  Its values are not trusted: keys and subjects come from senders, error
texts from handlers, servers and drivers.  The filter makes every value harmless:

- text that could end a line, pass for another field or steer a terminal is quoted and escaped;
- of an exception only the type is kept, because its text may hold arguments of a handler.  The text of onefold's own
  errors about its store, its brokers and its configuration is kept, because it says what to do;
- of a traceback the places and the types are kept.

A record has the same as data, for formatters that write JSON: ``event`` is its name, and ``fields`` has the values by
their names, unquoted, with the same texts left out.

The whole text of a failure is in the store, with the attempt and the dead letter.
"""

from __future__ import annotations

import json
import logging
import re
import traceback
from functools import lru_cache

from onefold.errors import ConfigurationError, LeaseLostError, StoreUnavailableError, TransportError

#: Errors with texts of onefold's own that hold nothing of a message.
_WORDED = (ConfigurationError, LeaseLostError, StoreUnavailableError, TransportError)
#: Types of values that are logged unchanged.
_PLAIN = (int, float, type(None))
#: Characters that are printable and would still end a value or begin another field.
_ENDS_A_VALUE = frozenset(" \"'=\\`")
#: A value is cut here: a key has 512 bytes at most, and a longer error text is in the store.
_VALUE_MAX = 1_000


#: A value in the format of a line, with its name if it has one; an event that is a value has none.
_FIELD = re.compile(r"(?:(\w+)=)?%[.\d]*[sdf]")
#: Formats that are remembered; there are fewer in the package.
_FORMATS_MAX = 256

_Value = int | float | str | None


def escaped(text: str) -> str:
    """Return text as one value of a log line: as it is if that is safe, otherwise quoted, with escapes."""
    if not text.isprintable():
        return json.dumps(text)
    if not text or not _ENDS_A_VALUE.isdisjoint(text):
        return json.dumps(text, ensure_ascii=False)
    return text


def _value_of(argument: object) -> _Value:
    """Return an argument as it may be logged: of an error its type, and its text only if that is onefold's own."""
    if isinstance(argument, _PLAIN):
        return argument
    if isinstance(argument, BaseException):
        kind = type(argument).__name__
        text = f"{kind}: {argument}" if isinstance(argument, _WORDED) else kind
    else:
        text = str(argument)
    return text if len(text) <= _VALUE_MAX else f"{text[:_VALUE_MAX]}…"


@lru_cache(_FORMATS_MAX)
def _names(form: str) -> tuple[str, tuple[str | None, ...]]:
    """Return the event of a line's format, and the names of its values in their order."""
    return form.partition(" ")[0], tuple(found[1] for found in _FIELD.finditer(form))


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
        event, names = _names(str(record.msg))
        values: tuple[_Value, ...] = ()
        if isinstance(record.args, tuple):
            values = tuple(map(_value_of, record.args))
            record.args = tuple(escaped(one) if isinstance(one, str) else one for one in values)
        record.event = str(values[0]) if event == "%s" and values else event
        record.fields = {name: value for name, value in zip(names, values, strict=False) if name is not None}
        if isinstance(record.exc_info, tuple):
            record.exc_text, record.exc_info = _places(record.exc_info[1]), None
        return True


logging.getLogger("onefold").addFilter(Escaping("onefold"))
