"""How each process of a worker finds the app that was named on the command line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from onefold import App, ConfigurationError
from onefold.processes.load_app import load_app


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory; modules imported from it are forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.mark.parametrize("where", ["", ":app", ".shop:app", "shop..tasks:app", "shop.:app", "shop\udcff:app"])
@pytest.mark.usefixtures("project")
def test_what_names_no_module_is_refused(where: str) -> None:
    """The error is typed, instead of a ValueError or a TypeError of the import system."""
    with pytest.raises(ConfigurationError, match="names no app; write MODULE:APP"):
        load_app(where)


def test_an_app_is_found_where_the_process_works(project: Path) -> None:
    (project / "found_shop.py").write_text("from onefold import App\napp = App()\nother = 1\n")
    assert isinstance(load_app("found_shop"), App)
    assert isinstance(load_app("found_shop:app"), App)
    with pytest.raises(ConfigurationError, match="has no 'none'"):
        load_app("found_shop:none")
    with pytest.raises(ConfigurationError, match="is a int, not an App"):
        load_app("found_shop:other")


def test_an_error_inside_the_app_is_not_taken_for_a_missing_app(project: Path) -> None:
    """An AttributeError or a missing module inside the app is reported as it is."""
    (project / "broken_shop.py").write_text("import os\nos.no_such_name\n")
    with pytest.raises(AttributeError, match="no_such_name"):
        load_app("broken_shop:app")
    (project / "needy_shop.py").write_text("import need\n")
    with pytest.raises(ModuleNotFoundError, match="'need'"):
        load_app("needy_shop:app")
    with pytest.raises(ConfigurationError, match=r"there is no module 'missing_shop\.tasks' here"):
        load_app("missing_shop.tasks:app")


def test_a_directory_that_was_removed_is_told(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = project / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(ConfigurationError, match="working directory was removed"):
        load_app("shop:app")
