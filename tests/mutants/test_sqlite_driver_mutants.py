"""Defects around the database file, put back: the scenarios of ``tests/faults`` find each of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.faults.sqlite_visitors import moved_file_accepts_nothing, second_app_then_visitor, sqlite3_beside_the_store

from onefold import StoreReplacedError
from onefold.store.sqlite import connection
from onefold.store.sqlite import second_library as guard


def test_reading_the_header_with_python_drops_the_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing that descriptor drops every POSIX lock that this process has on the file."""
    judge = connection._refuse_damaged

    def read_header(file: Path) -> None:
        with file.open("rb") as opened:
            opened.read(32)
        judge(file)

    monkeypatch.setattr(connection, "_refuse_damaged", read_header)
    with pytest.raises(AssertionError):
        second_app_then_visitor(tmp_path / "shop.db")


def test_without_the_audit_hook_a_second_library_removes_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter's module deletes the log on closing, and messages accepted later are lost."""
    monkeypatch.setattr(guard, "_refuse_connection", lambda database: None)
    monkeypatch.setattr(guard.Files, "check", lambda self: None)
    with pytest.raises(AssertionError):
        sqlite3_beside_the_store(tmp_path / "shop.db")


def test_without_comparing_inodes_a_file_without_a_name_accepts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sends are still answered, although no other process will ever find their file."""
    monkeypatch.setattr(guard.Files, "check", lambda self: None)
    with pytest.raises(pytest.fail.Exception):
        moved_file_accepts_nothing(tmp_path / "shop.db")


def test_the_inode_of_the_log_alone_finds_what_the_hook_did_not_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison before each answer is the second line of defence: no accepted send is lost."""
    monkeypatch.setattr(guard, "_refuse_connection", lambda database: None)
    with pytest.raises(StoreReplacedError):
        sqlite3_beside_the_store(tmp_path / "shop.db")
