"""Stage 3, envelope: arguments to canonical JSON bytes and back, by their type hints.

The handler's signature gives the types, and its one typed decoder is used twice:
at send on the bytes just written, so that a wrong argument fails in the caller's code,
and in the worker, so that a message from an older sender fails before the handler has begun.
Nothing is ever unpickled, and no decoder is chosen by a name inside a message.
"""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any, get_type_hints

import msgspec

from onefold import limits
from onefold.errors import ConfigurationError, DecodeError, EnvelopeError, LimitError, UnknownArgumentError

#: Types whose every value survives JSON unchanged, except for long numbers and NUL, which JSON writes as an escape.
_PLAIN = (int, str, bool)
_BACKSLASH = ord("\\")
#: Names of parameters and fields.  Any other text in their place came from a sender and may be a secret.
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")


def _encode_foreign(value: Any) -> Any:
    """Encode for msgspec a model it does not support: any class with pydantic's ``model_dump``."""
    try:
        dump = getattr(value, "model_dump", None)
        if dump is not None:
            return dump(mode="json")
    except Exception as error:
        raise TypeError(f"{type(value).__qualname__} cannot be dumped: {type(error).__name__}") from error
    raise NotImplementedError(f"{type(value).__qualname__} has no JSON form")


def _decode_foreign(kind: type, value: Any) -> Any:
    validate = getattr(kind, "model_validate", None)
    if validate is None:
        raise NotImplementedError(f"{kind!r} has no JSON form")
    try:
        return validate(value)
    except Exception as error:
        raise ValueError(_without_values(kind, error)) from None


def _without_values(kind: type, error: Exception) -> str:
    """Describe an error of pydantic without the value, which may be a secret.

    Its messages quote tags and the texts of the user's validators, and its locations the keys of mappings.  So each
    problem is reduced to the field of the model and the kind of problem, such as ``number: int_parsing``.
    """
    try:
        problems: Any = error.errors(include_input=False, include_url=False, include_context=False)  # type: ignore[attr-defined]
        summary = "; ".join(f"{_outermost(one['loc']) or kind.__name__}: {one['type']}" for one in problems)
    except Exception:
        summary = type(error).__name__
    return f"not a {kind.__name__}: {summary}"


def _outermost(location: Sequence[object]) -> str:
    """Return the field that a location begins with; the rest is left out, because it may hold keys of a mapping."""
    if not location:
        return ""
    name = str(location[0])
    return (name if _NAME.fullmatch(name) else "(a field)") + ("…" if len(location) > 1 else "")


def _refuse_foreign(kind: type) -> dict[str, Any]:
    """Return a schema for models that can be decoded; refuse any other type that msgspec does not support."""
    if not hasattr(kind, "model_validate"):
        raise TypeError(f"{getattr(kind, '__qualname__', kind)} has no JSON form")
    return {"type": "object"}


_encode = msgspec.json.Encoder(order="deterministic", enc_hook=_encode_foreign).encode


#: Copied for each digest, because a copy is faster than a new one.
_digest = blake2b(digest_size=16)


def fingerprint_of(data: bytes) -> bytes:
    """Return a short digest: equal for equal bytes, and different for different ones."""
    digest = _digest.copy()
    digest.update(data)
    return digest.digest()


class Signature:
    """Encodes and decodes the arguments of one handler.

    It is made when the handler is declared, and refuses parameters that have no JSON form.
    """

    def __init__(self, function: Callable[..., Any], *, skip: int, fingerprint: Sequence[str] | None = None) -> None:
        name = function.__qualname__
        try:
            hints = get_type_hints(function, include_extras=True)
        except NameError as error:
            raise ConfigurationError(f"{name}: a type hint cannot be found: {error}") from error
        self._python = inspect.signature(function)
        parameters = list(self._python.parameters.values())[skip:]
        self._python = self._python.replace(parameters=parameters)
        fields: list[Any] = []
        for p in parameters:
            if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
                raise ConfigurationError(f"{name}: *{p.name} cannot be a message argument; name each parameter")
            if p.kind is p.POSITIONAL_ONLY:
                raise ConfigurationError(f"{name}: {p.name} is positional-only; messages carry arguments by name")
            hint = hints.get(p.name, Any)
            fields.append((p.name, hint) if p.default is p.empty else (p.name, hint, _default(p.default)))
        self.names: tuple[str, ...] = tuple(p.name for p in parameters)
        self._positional = sum(p.kind is not p.KEYWORD_ONLY for p in parameters)
        self._by_place = self._positional == len(parameters)
        self._plain = all(hints.get(n) in _PLAIN for n in self.names)
        try:
            self._arguments = _struct(name, fields, kw_only=not self._by_place)
            for hint in (hints.get(n, Any) for n in self.names):
                msgspec.json.schema(hint, schema_hook=_refuse_foreign)
            self._decode = msgspec.json.Decoder(self._arguments, dec_hook=_decode_foreign).decode
            result = ResultCodec(hints.get("return", Any))
        except (TypeError, NotImplementedError) as error:
            raise ConfigurationError(f"{name}: a type hint or default cannot be part of a message: {error}") from error
        self.encode_result, self.decode_result = result.encode, result.decode
        self.hints: Mapping[str, Any] = {n: hints.get(n, Any) for n in self.names}
        self._fingerprint_fields = self._check_fingerprint(name, fingerprint)
        #: For each argument with a default: the type of the default, and its JSON.
        self._defaults = {
            p.name: (type(p.default), _json_or_none(p.default)) for p in parameters if p.default is not p.empty
        }

    def _check_fingerprint(self, name: str, fingerprint: Sequence[str] | None) -> tuple[str, ...] | None:
        for field in fingerprint or ():
            if field not in self.names:
                known = ", ".join(self.names) or "none"
                raise ConfigurationError(f"{name}: fingerprint names {field!r}; the arguments are: {known}")
        return None if fingerprint is None else tuple(sorted(fingerprint))

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Match arguments with parameters as a call would, and return them as a record.

        A missing, unknown or doubled argument raises ``TypeError``.
        """
        try:
            if self._by_place:
                return self._arguments(*args, **kwargs)
            if len(args) <= self._positional:
                return self._arguments(**dict(zip(self.names, args, strict=False)), **kwargs)
        except TypeError:
            pass
        # An argument is missing, unknown or given twice; bind() raises the error that Python raises for a call.
        self._python.bind(*args, **kwargs)
        raise AssertionError("the arguments fit the signature, but not its record")

    def encode(self, arguments: Any) -> tuple[bytes, bytes]:
        """Return bound arguments as canonical bytes and their fingerprint; refuse values that JSON would change.

        Arguments that are equal to their default are left out.  So a worker that does not have a new argument yet can
        read a message that does not use it, and the fingerprint of a send does not change when one is added.
        """
        try:
            given = self._without_defaults(arguments) if self._defaults else arguments
            data = _encode(given)
        except Exception as error:
            raise DecodeError("payload_inline", f"cannot be written as JSON: {error}") from error
        if not self._plain or _BACKSLASH in data or len(data) > limits.JSON_DIGITS_MAX:
            refuse_what_json_hides(data, given)
        try:
            self._decode(data)
        except _UNREADABLE as error:
            raise _wrong_argument(error) from None  # the cause would repeat the value
        if not self._plain:
            check_json("payload_inline", data)
        fields = self._fingerprint_fields
        compared = data if fields is None else _encode({name: getattr(arguments, name) for name in fields})
        return data, fingerprint_of(compared)

    def _without_defaults(self, arguments: Any) -> Any:
        """Return the record without arguments that equal their default; by type and JSON, because 1 == True."""
        left_out = {
            name: msgspec.UNSET
            for name, (kind, default) in self._defaults.items()
            if type(value := getattr(arguments, name)) is kind and _encode(value) == default
        }
        return msgspec.structs.replace(arguments, **left_out) if left_out else arguments

    def decode(self, data: bytes) -> dict[str, Any]:
        """Return the arguments; ``DecodeError`` names the field when they do not fit the signature.

        ``UnknownArgumentError`` is raised for an argument that the signature does not have.
        """
        try:
            return msgspec.structs.asdict(self._decode(data))
        except _UNREADABLE as error:
            wrong = _wrong_argument(error)
            raise UnknownArgumentError(wrong.field, wrong.problem) if _is_unknown(error) else wrong from None


class ResultCodec:
    """Encodes and decodes the result of a function, by its return hint.

    Raises ``TypeError`` or ``NotImplementedError`` for a hint that has no JSON form.
    """

    def __init__(self, hint: Any, *, most: int = limits.RESULT_BYTES_MAX, field: str = "result") -> None:
        msgspec.json.schema(hint, schema_hook=_refuse_foreign)
        self._read = _reader(hint)
        self._most = most
        self._field = field
        self._takes_nothing = hint in (None, type(None), Any)

    def encode(self, value: Any) -> bytes:
        """Return a result as bytes, or raise an ``EnvelopeError``, which fails the attempt."""
        if value is None and self._takes_nothing:
            return b"null"
        try:
            data = _encode(value)
        except Exception as error:
            raise DecodeError(self._field, f"cannot be written as JSON: {error}") from error
        refuse_what_json_hides(data, value, field=self._field)
        if len(data) > self._most:
            raise LimitError(
                self._field,
                f"has {len(data)} bytes; at most {self._most} are kept; keep it elsewhere and return a reference",
            )
        # Checked here, because a result that does not fit the return hint could be stored but never read.
        self.decode(data)
        return data

    def decode(self, data: bytes) -> Any:
        """Return the value that was encoded."""
        try:
            return self._read(data)
        except _UNREADABLE as error:
            raise DecodeError(self._field, _VALUE.sub(r"\1", str(error))) from None

    def decode_sent(self, data: bytes) -> Any:
        """Decode a value from another sender; ``UnknownArgumentError`` if it has a field that is not known here."""
        try:
            return self._read(data)
        except _UNREADABLE as error:
            kind = UnknownArgumentError if _is_unknown(error) else DecodeError
            raise kind(self._field, _VALUE.sub(r"\1", str(error))) from None


def result_codec(function: Callable[..., Any], *, most: int) -> ResultCodec:
    """Return the codec for the result of a local function; without a return hint it gives plain JSON values."""
    function = getattr(function, "func", function)  # of a functools.partial
    try:
        hint = get_type_hints(function, include_extras=True).get("return", Any)
    except (NameError, TypeError) as error:
        raise ConfigurationError(f"{function!r}: a type hint cannot be found: {error}") from error
    try:
        return _known_codec(hint, most)
    except (TypeError, NotImplementedError) as error:
        raise ConfigurationError(f"{function!r}: its return hint has no JSON form: {error}") from error


@lru_cache(maxsize=1_024)
def _known_codec(hint: Any, most: int) -> ResultCodec:
    return ResultCodec(hint, most=most)


def fingerprint_of_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
    """Return a digest of the arguments of a local call; empty if they have no JSON form to compare."""
    try:
        return fingerprint_of(_encode((args, kwargs) if kwargs else args))
    except Exception:
        return b""


def _default(value: Any) -> Any:
    """Return a default for msgspec, which refuses mutable ones: those are copied for each message."""
    if isinstance(value, list | dict | set):
        return msgspec.field(default_factory=lambda: value.copy())
    return value


def _struct(name: str, fields: list[Any], *, kw_only: bool) -> Any:
    return msgspec.defstruct(f"arguments of {name}", fields, kw_only=kw_only, forbid_unknown_fields=True)


def _reader(hint: Any) -> Callable[[bytes], Any]:
    return msgspec.json.Decoder(hint, dec_hook=_decode_foreign).decode


#: The value in an error of msgspec about an enum: any text, up to the end of the error, and perhaps a secret.
_VALUE = re.compile(r"(Invalid (?:enum )?value) .*(?= - at `\$)|(Invalid (?:enum )?value) .*", re.DOTALL)
#: The name in an error of msgspec about an unknown argument: any text that the sender chose.
_UNKNOWN = re.compile(r"(?<=unknown field `)(?:.*?(?=` - at `\$[\w.\[\]]{0,200}`\Z)|.*(?=`))", re.DOTALL)


#: Raised by a decoder for bytes that do not fit its type.
_UNREADABLE = (msgspec.DecodeError, ValueError, RecursionError)
#: The error for a field that the type does not have: of msgspec, and of a pydantic model that forbids such fields.
_UNKNOWN_FIELD = re.compile(r"\AObject contains unknown field `|\Anot a .*: extra_forbidden(;|\Z| - at `)", re.DOTALL)


def _is_unknown(error: Exception) -> bool:
    """Whether bytes could not be decoded because of a field that the type does not have."""
    return _UNKNOWN_FIELD.search(str(error)) is not None


def _json_or_none(default: Any) -> bytes | None:
    """Return the JSON of a default; None if it has none, so that no argument equals it."""
    try:
        return _encode(default)
    except Exception:
        return None


def _wrong_argument(error: Exception) -> DecodeError:
    text = _VALUE.sub(lambda found: found[1] or found[2], str(error))
    text = _UNKNOWN.sub(lambda found: found[0] if _NAME.fullmatch(found[0]) else "(not a name)", text)
    found = re.search(r"`\$\.?([^`]*)`", text) or re.search(r"field `([^`]*)`", text)
    return DecodeError((found.group(1) if found else "") or "payload_inline", text)


def refuse_what_json_hides(data: bytes, value: Any, *, field: str = "payload_inline") -> None:
    """Refuse values that JSON or its readers change silently: NaN and infinities become null, NUL cuts a text.

    A scan of the bytes, which is cheap, decides whether the value itself has to be walked.
    """
    deep = data.count(b"[") + data.count(b"{") > limits.JSON_DEPTH_MAX
    if deep or b"\\u0000" in data or (len(data) > limits.JSON_DIGITS_MAX and _LONG_NUMBER.search(data)):
        check_json(field, data)
    if b"null" in data:
        _refuse_non_finite(field, value, 0)


def _refuse_non_finite(field: str, value: Any, depth: int) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise EnvelopeError(field, f"{value!r} has no JSON form")
    if depth > limits.JSON_DEPTH_MAX or value is None or isinstance(value, str | bytes | int):
        return
    if isinstance(value, Mapping):
        for name, item in value.items():
            _refuse_non_finite(f"{field}.{name}", item, depth + 1)
    elif isinstance(value, list | tuple | set | frozenset):
        for index, item in enumerate(value):
            _refuse_non_finite(f"{field}[{index}]", item, depth + 1)
    else:
        for name in _field_names(value):
            _refuse_non_finite(f"{field}.{name}", getattr(value, name, None), depth + 1)


def _field_names(value: Any) -> tuple[str, ...]:
    """Return the fields of a Struct, a dataclass or a pydantic model."""
    for kind in ("__struct_fields__", "__dataclass_fields__", "model_fields"):
        if names := getattr(type(value), kind, None):
            return tuple(names)
    return ()


def check_json(field: str, data: bytes) -> None:
    """Refuse bytes that two JSON readers could take for two different values.

    Too much depth, long numbers, NaN, infinities, duplicate keys, lone surrogates, NUL and bytes that are not UTF-8
    each raise an ``EnvelopeError``.  It is a slow pass in pure Python, so it is for values from outside and for types
    that allow any value.
    """
    _check_depth(field, data)

    def number(text: str) -> int:
        if len(text) > limits.JSON_DIGITS_MAX:
            raise LimitError(
                field, f"a number has {len(text)} digits; at most {limits.JSON_DIGITS_MAX} are allowed; send it as text"
            )
        return int(text)

    def real(text: str) -> float:
        if len(text) > limits.JSON_DIGITS_MAX or not math.isfinite(value := float(text)):
            raise LimitError(field, "a number does not fit into a float; send it as text")
        return value

    def constant(text: str) -> None:
        raise DecodeError(field, f"{text} has no JSON form")

    def members(pairs: list[tuple[str, Any]]) -> None:
        if len({name for name, _ in pairs}) != len(pairs):
            raise DecodeError(field, "an object holds the same key twice")
        for name, value in pairs:
            text(name)
            text(value)

    def text(value: Any) -> None:
        if isinstance(value, str):
            if "\0" in value:
                raise DecodeError(field, "a text holds NUL")
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise DecodeError(field, "a text holds a lone surrogate") from error
        elif isinstance(value, list):
            for item in value:
                text(item)

    try:
        whole = json.loads(
            data.decode(), object_pairs_hook=members, parse_constant=constant, parse_int=number, parse_float=real
        )
    except EnvelopeError:
        raise
    except (ValueError, RecursionError) as error:
        raise DecodeError(field, f"is not JSON: {error}") from error
    text(whole)


#: The closing quote is optional: if a text without one did not match, the search would begin again at each quote in
#: it, and take a time that grows with the square of the length.
_STRUCTURE = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)
_LONG_NUMBER = re.compile(rb"[0-9]{%d}" % (limits.JSON_DIGITS_MAX + 1))


def _check_depth(field: str, data: bytes) -> None:
    depth = 0
    for found in _STRUCTURE.finditer(data):
        token = found.group()
        if token in (b"[", b"{"):
            depth += 1
            if depth > limits.JSON_DEPTH_MAX:
                raise LimitError(
                    field, f"is nested deeper than {limits.JSON_DEPTH_MAX} levels; flatten it or send a part as text"
                )
        elif token in (b"]", b"}"):
            depth -= 1
