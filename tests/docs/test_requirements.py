"""The page of requirements explains every id that a test cites, and its links lead to tests that exist."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/requirements.md"

#: A letter and a number, such as B25; ranges such as "E1 to E9" name their ends.
_ID = re.compile(r"\b[A-Q][1-9]\d?\b")
_ROW = re.compile(r"^\| ([A-Q]\d+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)


def prose_of(source: str) -> Iterator[str]:
    """Yield the docstrings and comments of a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def cited() -> dict[str, str]:
    """Return every id that tests and the contract suite cite, each with a file that cites it."""
    found: dict[str, str] = {}
    for folder in (ROOT / "tests", ROOT / "src/onefold/testing"):
        for path in sorted(folder.rglob("*.py")):
            if path != Path(__file__):
                ids = _ID.findall("\n".join(prose_of(path.read_text())))
                found |= dict.fromkeys(ids, str(path.relative_to(ROOT)))
    return found


def rows() -> list[tuple[str, str, str]]:
    return _ROW.findall(PAGE.read_text())


def test_every_id_that_a_test_cites_is_explained() -> None:
    """An id of another list, such as one of defects, has no row here, so it is found as well."""
    explained = {id_ for id_, _, _ in rows()}
    assert {id_: path for id_, path in cited().items() if id_ not in explained} == {}


def test_every_requirement_has_one_row_with_tests_that_exist() -> None:
    ids = [id_ for id_, _, _ in rows()]
    assert ids == sorted(set(ids), key=lambda id_: (id_[0], int(id_[1:])))
    for id_, requirement, tests in rows():
        links = re.findall(r"\]\(([^)]+)\)", tests)
        assert links, id_
        assert requirement.endswith("."), id_
        assert [link for link in links if not (PAGE.parent / link).is_file()] == [], id_


def test_ids_are_found_in_docstrings_and_comments_only() -> None:
    """The tests above can fail: a citation is found, and a name in the code is none."""
    source = '"""B25: text."""\nP95 = 1\n# see H7 (C12)\nS4 = "D1"\n'
    assert _ID.findall("\n".join(prose_of(source))) == ["B25", "H7", "C12"]
