"""Plain words: a process, a row or a lock is named, and is never "somebody"."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "src"

#: Words that hide which process, worker, row or caller is meant; and "who" for things.
HIDING = re.compile(r"\b(somebody|nobody|whoever|everybody|everyone|anybody|whom?)\b", re.IGNORECASE)
#: A sentence that begins with "What" or "Who" and ends without a question mark says its subject last, if at all.
HEADLESS = re.compile(r"(?:^\s*(?:#:?|--|\"\"\")?\s*|[.:] +)(?:What|Who) [^?\n]*\.(?:\s|\"|$)")

#: Lines in which a person is meant, by the words that show it.
PEOPLE = re.compile(r"\b(operator|person|people|user|users|reader|readers|human)\b", re.IGNORECASE)


def files() -> list[Path]:
    return sorted(path for path in SOURCES.rglob("*") if path.suffix in (".py", ".sql"))


@pytest.mark.parametrize("pattern", [HIDING, HEADLESS], ids=["hiding", "headless"])
def test_the_source_names_the_thing_it_speaks_of(pattern: re.Pattern[str]) -> None:
    """P7: whoever reads a line knows which process, row or lock it is about."""
    found = [
        f"{path.relative_to(SOURCES)}:{number}: {line.strip()}"
        for path in files()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line) and not PEOPLE.search(line)
    ]
    assert not found, "\n".join(found)


def test_the_patterns_find_what_they_are_about() -> None:
    """P7: the test above is no comfort unless it fails."""
    assert HIDING.search("# Somebody holds the lock.")
    assert HIDING.search("-- the worker who has the lease")
    assert HEADLESS.search('"""What is due comes first."""')
    assert HEADLESS.search("    # Who may be dangerous has no priority.")
    assert not HEADLESS.search("What is due first?")
    assert not HIDING.search("the whole row")
