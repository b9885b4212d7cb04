"""Stage 8, decide: a failure as it is stored with its message: error, text, stack and HTTP status."""

from __future__ import annotations

import linecache
import os
import traceback
from itertools import starmap
from types import FrameType, TracebackType
from typing import Any

from onefold import limits
from onefold.store import Failure

#: PostgreSQL drivers put this between the error and the values of the row that caused it.
_DETAIL = "\nDETAIL:"
#: The folder of this package, with which the names of its files begin.
_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")


def failure_of(error: BaseException, reason: str) -> Failure:
    """Describe an exception within the limits of the store, even one whose own methods raise."""
    kind = type(error)
    return Failure(
        reason=reason,
        error_type=kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}",
        error_message=_text(error),
        stack=_stack(error.__traceback__),
        status_code=status_of(error),
    )


def _stack(trace: TracebackType | None) -> str:
    """Format a stack from the handler on; the frames of onefold that called it are the same for every handler."""
    handler = trace
    while handler is not None and handler.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        handler = handler.tb_next
    return "".join(starmap(_describe, traceback.walk_tb(handler or trace)))[-limits.STACK_TEXT_MAX :]


def _describe(frame: FrameType, line: int | None) -> str:
    """Return the lines of one frame as ``traceback`` writes them, without the marks that need the source parsed."""
    name = frame.f_code.co_filename
    place = f'  File "{name}", line {line}, in {frame.f_code.co_name}\n'
    try:
        source = "" if line is None else linecache.getline(name, line, frame.f_globals).strip()
    except Exception:  # the loader of the handler's module reads the source, and may raise anything
        source = ""
    return f"{place}    {source}\n" if source else place


def _text(error: BaseException) -> str:
    try:
        text = str(error)
    except BaseException:  # __str__ is the handler's code and may raise anything
        return "(the exception cannot be printed)"
    if _DETAIL in text and peek(error, "sqlstate") is not None:
        text = text.partition(_DETAIL)[0]
    # PostgreSQL stores neither NUL nor lone surrogates.
    return text[: limits.ERROR_TEXT_MAX].encode("utf-8", "replace").decode().replace("\0", "�")


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status that an exception of httpx, requests, aiohttp or urllib carries."""
    for holder in (peek(error, "response"), error):
        for name in ("status_code", "status", "code"):
            status = peek(holder, name)
            if type(status) is int and 100 <= status <= 599:
                return status
    return None


def peek(holder: object, name: str) -> Any:
    """Return an attribute of a foreign object, or None if there is none or reading it raises."""
    try:
        return getattr(holder, name, None)
    except BaseException:
        return None
