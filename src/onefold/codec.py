"""Stage 3, envelope: arguments to canonical JSON bytes and back, by their type hints.

What a handler will be given is decided by its signature, so the same typed reader is used twice:
at send on the bytes just written, so that a wrong argument fails in the caller's hands,
and at receipt, so that a message from an older sender fails before any of the handler has run.
Nothing is ever unpickled, and no reader is chosen by a name inside a message.
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

#: Types whose every value survives JSON unchanged, so that only size and NUL, which is escaped, remain to be checked.
_PLAIN = (int, str, bool)
_BACKSLASH = ord("\\")
#: What a parameter or a field may be called; anything else in that place was made up by a sender.
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")


def _encode_foreign(value: Any) -> Any:
    """Teach msgspec the models it does not know: anything with pydantic's ``model_dump``."""
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
    """Say what pydantic did not like without repeating the value, which may be a secret.

    Its messages quote tags and what validators of the user's own say, and its locations the keys of mappings; so of
    each problem only the field of the model and the kind of problem are told, such as ``number: int_parsing``.
    """
    try:
        problems: Any = error.errors(include_input=False, include_url=False, include_context=False)  # type: ignore[attr-defined]
        told = "; ".join(f"{_outermost(one['loc']) or kind.__name__}: {one['type']}" for one in problems)
    except Exception:
        told = type(error).__name__
    return f"not a {kind.__name__}: {told}"


def _outermost(location: Sequence[object]) -> str:
    """Return the field of a location, without what lies in it: the keys of a mapping are values too."""
    if not location:
        return ""
    name = str(location[0])
    return (name if _NAME.fullmatch(name) else "(a field)") + ("…" if len(location) > 1 else "")


def _refuse_foreign(kind: type) -> dict[str, Any]:
    """Answer for models that can be read; everything else without a JSON form is refused when it is declared."""
    if not hasattr(kind, "model_validate"):
        raise TypeError(f"{getattr(kind, '__qualname__', kind)} has no JSON form")
    return {"type": "object"}


_encode = msgspec.json.Encoder(order="deterministic", enc_hook=_encode_foreign).encode


#: Copied for each digest, because setting one up takes longer than to copy it.
_digest = blake2b(digest_size=16)


def fingerprint_of(data: bytes) -> bytes:
    """Return a short digest that two payloads share only if they are the same bytes."""
    digest = _digest.copy()
    digest.update(data)
    return digest.digest()


class Signature:
    """How the arguments of one handler are written and read.

    Made once, when the handler is declared; a parameter that has no JSON form is refused there.
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
        self._print_fields = self._check_fingerprint(name, fingerprint)
        #: Of the arguments with a default: its type, and how it is written.
        self._defaults = {
            p.name: (type(p.default), _written(p.default)) for p in parameters if p.default is not p.empty
        }

    def _check_fingerprint(self, name: str, fingerprint: Sequence[str] | None) -> tuple[str, ...] | None:
        for field in fingerprint or ():
            if field not in self.names:
                raise ConfigurationError(f"{name}: fingerprint names {field!r}, which is not a parameter")
        return None if fingerprint is None else tuple(sorted(fingerprint))

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Match arguments with parameters as a call would, and return them as a record.

        A wrong one raises ``TypeError`` at once.
        """
        try:
            if self._by_place:
                return self._arguments(*args, **kwargs)
            if len(args) <= self._positional:
                return self._arguments(**dict(zip(self.names, args, strict=False)), **kwargs)
        except TypeError:
            pass
        # Some argument is missing, unknown or given twice; Python itself says it best.
        self._python.bind(*args, **kwargs)
        raise AssertionError("these arguments fit the signature, but not its record")

    def encode(self, arguments: Any) -> tuple[bytes, bytes]:
        """Return bound arguments as canonical bytes and their fingerprint; refuse what would not arrive as sent.

        Arguments that are equal to their default are left out.  A worker that does not know a new argument yet can so
        read what says nothing about it, and a send from before it was added is no other work than one from after.
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
        return data, fingerprint_of(data if self._print_fields is None else self._printed(arguments))

    def _printed(self, arguments: Any) -> bytes:
        return _encode({name: getattr(arguments, name) for name in self._print_fields or ()})

    def _without_defaults(self, arguments: Any) -> Any:
        """Return the record without what is written as its default is; equal values such as 1 and True differ there."""
        left_out = {
            name: msgspec.UNSET
            for name, (kind, written) in self._defaults.items()
            if type(value := getattr(arguments, name)) is kind and _encode(value) == written
        }
        return msgspec.structs.replace(arguments, **left_out) if left_out else arguments

    def decode(self, data: bytes) -> dict[str, Any]:
        """Return the arguments; raises ``DecodeError`` naming the field when they do not fit the signature.

        ``UnknownArgumentError`` says that there is one more than the signature has.
        """
        try:
            return msgspec.structs.asdict(self._decode(data))
        except _UNREADABLE as error:
            wrong = _wrong_argument(error)
            raise UnknownArgumentError(wrong.field, wrong.problem) if _is_unknown(error) else wrong from None


class ResultCodec:
    """How what a function returns is written and read, by its return hint.

    Raises ``TypeError`` or ``NotImplementedError`` for a hint that has no JSON form.
    """

    def __init__(self, hint: Any, *, most: int = limits.RESULT_BYTES_MAX, field: str = "result") -> None:
        msgspec.json.schema(hint, schema_hook=_refuse_foreign)
        self._read = _reader(hint)
        self._most = most
        self._field = field
        self._takes_nothing = hint in (None, type(None), Any)

    def encode(self, value: Any) -> bytes:
        """Return a result as bytes; one that cannot be kept fails the attempt."""
        if value is None and self._takes_nothing:
            return b"null"
        try:
            data = _encode(value)
        except Exception as error:
            raise DecodeError(self._field, f"cannot be written as JSON: {error}") from error
        refuse_what_json_hides(data, value, field=self._field)
        if len(data) > self._most:
            raise LimitError(self._field, f"has {len(data)} bytes; at most {self._most} are kept")
        # A result that does not fit the return hint would be stored, and then refused to everybody who asks for it.
        self.decode(data)
        return data

    def decode(self, data: bytes) -> Any:
        """Return what was encoded."""
        try:
            return self._read(data)
        except _UNREADABLE as error:
            raise DecodeError(self._field, _VALUE.sub(r"\1", str(error))) from None

    def decode_sent(self, data: bytes) -> Any:
        """Return what was sent, perhaps by a newer version of the code, which ``UnknownArgumentError`` says."""
        try:
            return self._read(data)
        except _UNREADABLE as error:
            kind = UnknownArgumentError if _is_unknown(error) else DecodeError
            raise kind(self._field, _VALUE.sub(r"\1", str(error))) from None


def result_codec(function: Callable[..., Any], *, most: int) -> ResultCodec:
    """Return how the result of a local function is kept; without a return hint, as what JSON makes of it."""
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
    """Let a mutable default be made anew for every message, as msgspec wants it."""
    if isinstance(value, list | dict | set):
        return msgspec.field(default_factory=lambda: value.copy())
    return value


def _struct(name: str, fields: list[Any], *, kw_only: bool) -> Any:
    return msgspec.defstruct(f"arguments of {name}", fields, kw_only=kw_only, forbid_unknown_fields=True)


def _reader(hint: Any) -> Callable[[bytes], Any]:
    return msgspec.json.Decoder(hint, dec_hook=_decode_foreign).decode


#: msgspec repeats a value that is none of an enum's; the value may be a secret, and say anything up to its end.
_VALUE = re.compile(r"(Invalid (?:enum )?value) .*(?= - at `\$)|(Invalid (?:enum )?value) .*", re.DOTALL)
#: And the name of an argument that there is none for, which is the sender's to choose.
_UNKNOWN = re.compile(r"(?<=unknown field `)(?:.*?(?=` - at `\$[\w.\[\]]{0,200}`\Z)|.*(?=`))", re.DOTALL)


#: What reading bytes by a type raises when they do not fit.
_UNREADABLE = (msgspec.DecodeError, ValueError, RecursionError)
#: How a reader says that there is a field which its type does not have: msgspec, and a pydantic model that forbids it.
_UNKNOWN_FIELD = re.compile(r"\AObject contains unknown field `|\Anot a .*: extra_forbidden(;|\Z| - at `)", re.DOTALL)


def _is_unknown(error: Exception) -> bool:
    """Whether bytes could not be read because they say more than is known here."""
    return _UNKNOWN_FIELD.search(str(error)) is not None


def _written(default: Any) -> bytes | None:
    """Return a default as it would be written; None if it has no JSON form, which no value that is sent can equal."""
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
    """Refuse values that JSON would change silently: NaN and infinities become null, NUL ends text elsewhere.

    The scan of the bytes is cheap and finds almost nothing; only then is the value itself walked.
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

    Depth, long numbers, NaN, infinities, duplicate keys, lone surrogates, NUL and bytes that are not UTF-8:
    each raises one typed error.  Costs a pure Python pass, so it guards the borders and open types only.
    """
    _check_depth(field, data)

    def number(text: str) -> int:
        if len(text) > limits.JSON_DIGITS_MAX:
            raise LimitError(field, f"a number has {len(text)} digits; at most {limits.JSON_DIGITS_MAX} are allowed")
        return int(text)

    def real(text: str) -> float:
        if len(text) > limits.JSON_DIGITS_MAX or not math.isfinite(value := float(text)):
            raise LimitError(field, "a number is out of range")
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


#: A text may lack its end: were that no match, every quote in it would be tried as a beginning, for hours.
_STRUCTURE = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)
_LONG_NUMBER = re.compile(rb"[0-9]{%d}" % (limits.JSON_DIGITS_MAX + 1))


def _check_depth(field: str, data: bytes) -> None:
    depth = 0
    for found in _STRUCTURE.finditer(data):
        token = found.group()
        if token in (b"[", b"{"):
            depth += 1
            if depth > limits.JSON_DEPTH_MAX:
                raise LimitError(field, f"is nested deeper than {limits.JSON_DEPTH_MAX} levels")
        elif token in (b"]", b"}"):
            depth -= 1
