"""Named statements and numbered migrations, read from the ``.sql`` files beside each store.

Statements are never built from strings: each is written out in ``queries.sql`` under the name of the verb it serves,
with the same names in the same order for every store, so that the files can be read side by side.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from importlib.resources import files

_NAMED = re.compile(r"^-- name: (\w+)\n", re.MULTILINE)
_MIGRATION = re.compile(r"(\d{4})_\w+\.sql")


def load_statements(package: str, file: str = "queries.sql") -> dict[str, str]:
    """Return the statements of one of a store's files by name."""
    text = files(package).joinpath(file).read_text()
    parts = _NAMED.split(text)[1:]
    return {
        name: "\n".join(line for line in body.strip().splitlines() if not line.lstrip().startswith("--"))
        for name, body in zip(parts[::2], parts[1::2], strict=True)
    }


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
        Migration(int(match.group(1)), file.name, file.read_text())
        for file in folder.iterdir()
        if (match := _MIGRATION.fullmatch(file.name))
    ]
    return sorted(found, key=lambda migration: migration.number)


def split_script(text: str) -> list[str]:
    """Split a migration into statements; they end with a semicolon at the end of a line."""
    statements = [part.strip() for part in re.split(r";[ \t]*$", text, flags=re.MULTILINE)]
    return [part for part in statements if re.sub(r"--.*", "", part).strip()]
