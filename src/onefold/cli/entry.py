"""Running a command: standard streams, arguments, errors and the exit code.

A command ends with 0 after success; 1 after a failure, with one line that gives the reason; 2 after wrong arguments;
130 after Ctrl-C; 141 when its output was closed by the reader, like a program that was ended by SIGPIPE.
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
            _print_error(str(error))
        code = READER_GONE if error.reader_gone else FAILED
    return _flush(code)


def _run(cli: typer.Typer, arguments: Sequence[str]) -> int:
    if odd := [number for number, one in enumerate(arguments, 1) if not _is_text(one)]:
        _print_error(f"argument {odd[0]} is not text in UTF-8; nothing was done")
        return MISUSED
    if exposed := [number for number, one in enumerate(arguments) if _is_exposed(arguments, number)]:
        # Refused here, because the parser would quote it in its error.
        _print_error(f"argument {exposed[0] + 1} is a URL with a password where no URL is expected; use --url-file")
        return MISUSED
    try:
        cli(arguments, prog_name="onefold")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else FAILED if ended.code else 0
    except OutputLostError:
        raise
    except OnefoldError as error:
        _print_error(str(error))
    except OSError as error:
        where = "" if error.filename is None else f": {os.fsdecode(error.filename)}"
        _print_error(f"{error.strerror or error}{where}")
    except Exception as error:
        for one in "".join(traceback.format_exception(error)).splitlines():
            errors.say(one)
    return FAILED


def _print_error(text: str) -> None:
    errors.say(("onefold:", "red"), f" {text}")


def _is_text(argument: str) -> bool:
    """Whether an argument is text in the encoding of the system; Python passes other bytes as lone surrogates."""
    try:
        argument.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_exposed(arguments: Sequence[str], number: int) -> bool:
    """Whether an argument is a URL with a password where no URL is expected."""
    return _SECRET_URL.match(arguments[number]) is not None and (number == 0 or arguments[number - 1] != "--url")


def _repair_streams() -> None:
    """Make sure that the three standard streams are open and can write every character."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # Otherwise the next file or socket would get this number, and prints would go into it.
            os.open(os.devnull, os.O_RDWR)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for as long as the process lives
        elif isinstance(stream, io.TextIOWrapper):
            # A locale without UTF-8 cannot write every text of a store.
            stream.reconfigure(errors="backslashreplace")


def _flush(code: int) -> int:
    """Flush standard output here, because the interpreter prints a traceback if it fails to do so at its exit."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError) as error:
        if isinstance(error, OSError):
            # Discard the rest of the output, or the interpreter would try to write it at its exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if code == 0:
            code = READER_GONE if isinstance(error, BrokenPipeError) else FAILED
    return code
