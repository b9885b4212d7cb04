"""The check that a session leaves no process behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests import left_behind

pytestmark = pytest.mark.skipif(not left_behind.is_possible(), reason="processes are looked for in /proc")
ROOT = Path(__file__).parent.parent.parent


def test_a_process_is_found_by_its_mark_and_ended() -> None:
    with subprocess.Popen(["sleep", "600"], env={**os.environ, left_behind.VARIABLE: "mine"}) as process:
        try:
            assert left_behind.find("other") == []
            (found,) = left_behind.wait_for_none("mine", seconds=0)
            assert (found.pid, found.parent, found.command) == (process.pid, os.getpid(), "sleep 600")
            assert "test_a_process_is_found" in found.test
            assert process.wait(10) == -9
            assert left_behind.find("mine") == []
        finally:
            process.kill()


@pytest.mark.parametrize("options", [["-p", "no:xdist"], ["-n", "1"]], ids=["alone", "xdist"])
def test_a_session_that_leaves_a_process_fails(tmp_path: Path, options: list[str]) -> None:
    """As a whole session, with the same plugin: the tests pass and the session does not."""
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_configure, pytest_sessionfinish\n")
    (tmp_path / "test_it.py").write_text(
        "import subprocess\ndef test_leaves_one(): subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
    )
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from tests import left_behind; left_behind.wait_for_none.__defaults__ = (0.2,)\n"
        "import pytest; sys.exit(pytest.main(sys.argv[1:]))"
    )
    environment = {name: value for name, value in os.environ.items() if name != left_behind.VARIABLE}
    done = subprocess.run(
        [sys.executable, "-c", program, "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path), *options],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, "1 passed" in done.stdout) == (1, True), done.stdout + done.stderr
    assert "LEFT BEHIND: process" in done.stdout
    assert "sleep 600 (started by test_it.py::test_leaves_one (call))" in done.stdout
