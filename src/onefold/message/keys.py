"""Stage 4, identity: the keys of a message.

An idempotency key names the work: two sends with the same key are the same work.
It is made from the arguments, through a template such as ``"{order_id}:charge"`` or a function of them;
a message id is never a key, because it is new with every send.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import string
import types
import typing
import uuid
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any

import msgspec

from onefold import limits
from onefold.errors import ConfigurationError, EnvelopeError

KeyFunction = Callable[[Mapping[str, Any]], str]
#: The values of ``key=`` and ``subject=``: a template over the arguments, or a function of them.
KeySource = str | Callable[..., str]

_SIMPLE = (str, int, uuid.UUID, dt.date, dt.datetime, enum.Enum)


def from_source(name: str, what: str, source: KeySource, hints: Mapping[str, Any]) -> KeyFunction:
    """Turn a template or a function into a function of the bound arguments; refuse ambiguous or unstable ones."""
    return from_template(name, what, source, hints) if isinstance(source, str) else from_function(name, source, hints)


def from_template(name: str, what: str, template: str, hints: Mapping[str, Any]) -> KeyFunction:
    """Compile ``"{customer}:{invoice}"``.

    Different arguments never give the same key: the characters between the fields are escaped inside them.
    """
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ConfigurationError(f"{name}: {what} {template!r} is not a template: {error}") from error
    fields = [(literal, field) for literal, field, _, _ in parts if field is not None]
    if not fields and what == "key":
        raise ConfigurationError(
            f"{name}: {what} {template!r} names no argument, so all messages would have one key; name one, as in "
            "'{order_id}'"
        )
    for index, (literal, field) in enumerate(fields):
        root = field.split(".")[0].split("[")[0]
        if root not in hints:
            known = ", ".join(hints) or "none"
            raise ConfigurationError(f"{name}: {what} {template!r} names {field!r}; the arguments are: {known}")
        if index and not literal:
            raise ConfigurationError(
                f"{name}: {what} {template!r} joins two fields with nothing between them; put ':' between them"
            )
    if any(spec or conversion for _, _, spec, conversion in parts):
        raise ConfigurationError(
            f"{name}: {what} {template!r} must not use format codes such as '!r' or ':03d'; use a function for those"
        )
    between = {character for literal, _ in fields[1:] for character in literal} if len(fields) > 1 else set()
    escapes = {ord(c): "".join(f"%{byte:02x}" for byte in c.encode()) for c in between | {"%"}} if between else {}
    steps = [(literal, None if field is None else _reader(what, field)) for literal, field, _, _ in parts]
    if len(steps) == 1 and not steps[0][0] and steps[0][1] is not None:
        return steps[0][1]  # the template is a single field

    def key(arguments: Mapping[str, Any]) -> str:
        result = ""
        for literal, read in steps:
            result += literal
            if read is not None:
                text = read(arguments)
                result += text.translate(escapes) if escapes else text
        return result

    return key


def _reader(what: str, field: str) -> KeyFunction:
    """Return the function that reads one field of a template from the arguments, as text."""
    if field.isidentifier():

        def read_plain(arguments: Mapping[str, Any]) -> str:
            value = arguments[field]
            return str(value) if type(value) is int else _text(what, field, value)

        return read_plain
    formatter = string.Formatter()

    def read(arguments: Mapping[str, Any]) -> str:
        try:
            value, _ = formatter.get_field(field, (), arguments)
        except (AttributeError, LookupError, TypeError) as error:
            raise EnvelopeError(_field(what), f"{field} is not in the arguments") from error
        return _text(what, field, value)

    return read


def _text(what: str, field: str, value: Any) -> str:
    """Return the text of a value; refuse types whose text may differ for the same work, such as float."""
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, dt.datetime | dt.date):
        return value.isoformat()
    if not isinstance(value, _SIMPLE) or value == "":
        raise EnvelopeError(
            _field(what),
            f"{field} is an empty text or a {type(value).__name__}; use text, whole numbers, UUIDs, dates or enums",
        )
    return str(value)


def _field(what: str) -> str:
    return "idempotency_key" if what == "key" else what


def from_function(name: str, function: Callable[..., str], hints: Mapping[str, Any]) -> KeyFunction:
    """Wrap a function of the arguments; refuse it if two calls with the same sample arguments differ."""
    known = _key_of_sample(function, hints)
    if known is not None:
        _refuse_unstable(name, known, _key_of_sample(function, hints) or known)
    sends, next_look = 0, 1

    def key(arguments: Mapping[str, Any]) -> str:
        nonlocal sends, next_look
        sends += 1
        if sends >= next_look:
            # Again at the first send, the second, the fourth and so on: a key made from the time has changed by then.
            next_look = 2 * sends
            if known is None:
                _refuse_unstable(name, function(**arguments), function(**arguments))
            else:
                _refuse_unstable(name, known, _key_of_sample(function, hints) or known)
        value = function(**arguments)
        if not isinstance(value, str):
            raise EnvelopeError(
                "idempotency_key", f"the key function of {name} returned {type(value).__name__}; return a str"
            )
        return value

    return key


def _key_of_sample(function: Callable[..., str], hints: Mapping[str, Any]) -> object | None:
    """Return the key of sample arguments; None if no samples can be made or the function refuses them.

    Without a sample the function is checked with the arguments of real sends.
    """
    try:
        return function(**{field: _sample(hint) for field, hint in hints.items()})
    except Exception:
        return None


def _refuse_unstable(name: str, first: object, second: object) -> None:
    if first != second:
        raise ConfigurationError(
            f"{name}: the key function returned {str(first)[:60]!r} and then {str(second)[:60]!r} "
            "for the same arguments; a key must come from the arguments alone, not from time or chance"
        )


_SAMPLES: dict[Any, Any] = {
    int: 7,
    str: "sample",
    bool: True,
    float: 1.5,
    bytes: b"sample",
    type(None): None,
    Any: "sample",
    uuid.UUID: uuid.UUID(int=7),
    dt.datetime: dt.datetime(2020, 1, 2, tzinfo=dt.UTC),
    dt.date: dt.date(2020, 1, 2),
    dt.timedelta: dt.timedelta(seconds=7),
}


def _sample(hint: Any) -> Any:
    """Return a sample value of a type, or raise ``TypeError``."""
    if hint in _SAMPLES:
        return _SAMPLES[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated or origin in (typing.Union, types.UnionType):
        return _sample(arguments[0])
    if origin is typing.Literal:
        return arguments[0]
    if origin in (list, tuple, set, frozenset):
        return origin([_sample(arguments[0])])
    if origin is dict:
        return {_sample(arguments[0]): _sample(arguments[1])}
    if isinstance(hint, type):
        if issubclass(hint, enum.Enum):
            return next(iter(hint))
        if dataclasses.is_dataclass(hint) or issubclass(hint, msgspec.Struct):
            fields = typing.get_type_hints(hint)
            return hint(**{field: _sample(kind) for field, kind in fields.items()})
    raise TypeError(f"no sample of {hint!r}")


def upstream_key(origin: str, scope: str, idempotency_key: str, effect: str) -> str:
    """Return the key of one effect at an outside provider: the same on every retry, redrive and second send.

    ``origin`` names the database and the app, so that two of them never share a key; see ``onefold.store.identity``.
    """
    limits.check_name("effect", effect)
    digest = blake2b(f"{origin}\0{scope}\0{idempotency_key}".encode(), digest_size=16).hexdigest()
    return f"onefold-{effect}-{digest}"
