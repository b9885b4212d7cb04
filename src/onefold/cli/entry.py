"""The way into every command and out of it: standard streams, arguments, errors and the exit code.

A command ends with 0 when it did what it was told; 1 when it could not, with one line that says why; 2 when it was
called wrongly; 130 after Ctrl-C; 141 when the reader of its output was gone, as a program that SIGPIPE has ended.
"""

from __future__ import annotations

import io
import os
import re
import sys
import traceback
from collections.abc import Sequence

import typer

from onefold.cli.screen import OutputLostError, errors
from onefold.errors import OnefoldError

#: A URL with a user and a password; one slash may be missing.
_SECRET_URL = re.compile(r"[a-z][a-z0-9+.-]*:/+[^/\s]*:\S*@", re.IGNORECASE)
FAILED, MISUSED, READER_GONE = 1, 2, 141


def run_command(cli: typer.Typer, arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code of its process."""
    _repair_streams()
    try:
        code = _run(cli, sys.argv[1:] if arguments is None else arguments)
    except OutputLostError as error:
        if not error.reader_gone:
            _tell(str(error))
        code = READER_GONE if error.reader_gone else FAILED
    return _flush(code)


def _run(cli: typer.Typer, arguments: Sequence[str]) -> int:
    if odd := [number for number, one in enumerate(arguments, 1) if not _is_text(one)]:
        _tell(f"argument {odd[0]} is not text in UTF-8; nothing was done")
        return MISUSED
    if exposed := [number for number, one in enumerate(arguments) if _is_exposed(arguments, number)]:
        # The parser would repeat it in its error.
        _tell(f"argument {exposed[0] + 1} is a URL with a password in the place of something else; see --url-file")
        return MISUSED
    try:
        cli(arguments, prog_name="onefold")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else FAILED if ended.code else 0
    except OutputLostError:
        raise
    except OnefoldError as error:
        _tell(str(error))
    except OSError as error:
        where = "" if error.filename is None else f": {os.fsdecode(error.filename)}"
        _tell(f"{error.strerror or error}{where}")
    except Exception as error:
        for one in "".join(traceback.format_exception(error)).splitlines():
            errors.say(one)
    return FAILED


def _tell(text: str) -> None:
    errors.say(("onefold:", "red"), f" {text}")


def _is_text(argument: str) -> bool:
    """Whether an argument was text in the encoding of the system; other bytes come as halves of characters."""
    try:
        argument.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_exposed(arguments: Sequence[str], number: int) -> bool:
    """Whether an argument is a URL with a password where no URL is taken."""
    return _SECRET_URL.match(arguments[number]) is not None and (number == 0 or arguments[number - 1] != "--url")


def _repair_streams() -> None:
    """Have three streams that are open and can write every character, however the process was started."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The next file or socket would have this number, and be written to by what prints.
            os.open(os.devnull, os.O_RDWR)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for as long as the process lives
        elif isinstance(stream, io.TextIOWrapper):
            # A locale without UTF-8 cannot write all that a store holds.
            stream.reconfigure(errors="backslashreplace")


def _flush(code: int) -> int:
    """Write what is left, so that the interpreter, at its end, finds nothing that it would complain about."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError) as error:
        if isinstance(error, OSError):
            # What is left goes nowhere now, or the interpreter would try it once more.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if code == 0:
            code = READER_GONE if isinstance(error, BrokenPipeError) else FAILED
    return code
