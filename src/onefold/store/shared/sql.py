"""Named statements and numbered migrations, read from the ``.sql`` files beside each store.

Each statement stands in a file under the name of the verb it serves, with the same names in the same order for every
store, so that the files can be read side by side.
Text that several statements share is written once as a part (``-- part: NAME``) and named in braces, and so are the
numbers of states, kinds of keys and kinds of journal lines: ``{leased}``, ``{key_idempotency}``, ``{line_signal}``.
Values never come in this way; they are parameters.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

from onefold.store.journal_lines import LineKind
from onefold.store.shared import duplicates
from onefold.store.shared.rows import MESSAGE_COLUMNS
from onefold.store.states import State

_HEADING = re.compile(r"^-- (name|part): (\w+)\n", re.MULTILINE)
_IN_BRACES = re.compile(r"\{(\w+)\}")
_MIGRATION = re.compile(r"(\d{4})_\w+\.sql")

#: The numbers that rows hold, by the names that statements and migrations use for them; and the columns of ``message``.
NAMES: Mapping[str, str] = {
    **{state.name.lower(): str(int(state)) for state in State},
    **{f"line_{kind.name.lower()}": str(int(kind)) for kind in LineKind},
    "key_idempotency": str(duplicates.IDEMPOTENCY),
    "key_deduplication": str(duplicates.DEDUPLICATION),
    "key_batch": str(duplicates.BATCH),
    "message_columns": ", ".join(MESSAGE_COLUMNS),
    "columns_of_m": ", ".join(f"m.{column}" for column in MESSAGE_COLUMNS),
}


def fill_in(text: str, names: Mapping[str, str]) -> str:
    """Replace each name in braces by what it stands for; an unknown one is a ``KeyError``."""
    return _IN_BRACES.sub(lambda found: names[found[1]], text)


def load_statements(package: str, *file_names: str, names: Mapping[str, str]) -> dict[str, str]:
    """Return the statements of a store's files by name, with their parts filled in.

    A file may use the parts of those before it.
    """
    known = {**NAMES, **names}
    statements: dict[str, str] = {}
    for file in file_names:
        pieces = _HEADING.split(files(package).joinpath(file).read_text())[1:]
        for heading, name, body in zip(pieces[::3], pieces[1::3], pieces[2::3], strict=True):
            lines = [line for line in body.strip().splitlines() if not line.lstrip().startswith("--")]
            text = fill_in("\n".join(lines), known)
            if heading == "part":
                known[name] = text
            else:
                statements[name] = text
    return statements


@dataclass(frozen=True, slots=True)
class Migration:
    """One step of the schema; a released one never changes, which its checksum proves."""

    number: int
    name: str
    text: str

    @property
    def checksum(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


def load_migrations(package: str) -> list[Migration]:
    """Return a store's migrations in their order."""
    folder = files(package).joinpath("migrations")
    found = [
        Migration(int(match.group(1)), file.name, fill_in(file.read_text(), NAMES))
        for file in folder.iterdir()
        if (match := _MIGRATION.fullmatch(file.name))
    ]
    return sorted(found, key=lambda migration: migration.number)


def split_script(text: str) -> list[str]:
    """Split a migration into statements; they end with a semicolon at the end of a line."""
    statements = [part.strip() for part in re.split(r";[ \t]*$", text, flags=re.MULTILINE)]
    return [part for part in statements if re.sub(r"--.*", "", part).strip()]
