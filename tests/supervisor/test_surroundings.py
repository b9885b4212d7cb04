"""The surroundings of a supervisor: signals to all of its processes, lost streams, odd directories and programs."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from supervisor_scene import PATIENCE_SECONDS, Running, Scene, wait_until

from onefold import State

#: The installed command: unlike ``python -m``, it does not put the working directory on the path.
INSTALLED = (str(Path(sys.executable).parent / "onefold"),)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_all_processes_lets_handlers_finish(local: Scene, number: int) -> None:
    """Systemd signals every process of a service, and a closed terminal every process of its group."""
    local.send("apart", ("isolated", 1.0))
    local.send("wait", ("plain", 1.0))
    worker = local.work("--lease", "3600").wait_ready()
    wait_until(lambda: len(local.runs()) == 2, local.story)
    worker.signal_all(number)
    assert worker.wait() == 0
    assert local.states() == {State.DONE: 2}
    assert {record.crashes for record in local.records().values()} == {0}


def test_the_end_of_a_terminal_is_told_twice_and_means_one_stop(local: Scene) -> None:
    """Both the kernel and the shell send SIGHUP."""
    local.send("wait", ("plain", 1.0))
    worker = local.work("--lease", "3600").wait_ready()
    wait_until(local.runs, local.story)
    worker.signal(signal.SIGHUP)
    wait_until(lambda: "stopping" in worker.printed, lambda: worker.printed)
    worker.signal(signal.SIGHUP)
    assert worker.wait() == 0
    assert local.states() == {State.DONE: 1}


def test_a_process_that_is_killed_while_it_stops_blames_no_message(local: Scene) -> None:
    """A service manager kills the processes one by one when a stop takes too long."""
    local.send("wait", ("long", 3_600.0))
    worker = local.work("--lease", "3600").wait_ready()
    wait_until(local.runs, local.story)
    (child,) = worker.children()
    worker.terminate()
    wait_until(lambda: "stopping" in worker.printed, lambda: worker.printed)
    os.kill(child, signal.SIGKILL)
    assert worker.wait() == 0
    (record,) = local.records().values()
    assert (record.state, record.crashes, record.attempt) == (State.SCHEDULED, 0, 0)


@contextmanager
def lost(how: str) -> Iterator[int]:
    """A standard error to which nothing can be written."""
    if how == "a full disk":
        descriptor = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, descriptor = os.pipe()
        os.close(reader)
    yield descriptor
    os.close(descriptor)


@pytest.mark.parametrize("how", ["a full disk", "no reader"])
def test_a_lost_standard_error_changes_nothing(local: Scene, how: str) -> None:
    """SIGTERM must still stop the worker, and must not kill running handlers."""
    if how == "a full disk" and not os.path.exists("/dev/full"):
        pytest.skip("A FULL STANDARD ERROR IS NOT TESTED: there is no /dev/full here")
    local.send("wait", ("plain", 1.0))
    with lost(how) as descriptor:
        worker = local.work("--lease", "3600", errors=descriptor)
    wait_until(local.runs, local.story)
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    assert local.states() == {State.DONE: 1}


def test_one_signal_to_a_reloader_and_its_supervisor_is_one(local: Scene) -> None:
    """Counted as two signals, it would end running handlers at once."""
    local.send("wait", ("plain", 1.0))
    worker = local.work("--reload", "--lease", "3600").wait_ready()
    wait_until(local.runs, local.story)
    worker.signal_all(signal.SIGTERM)
    assert worker.wait() == 0
    assert local.states() == {State.DONE: 1}


def test_a_second_signal_to_a_reloader_ends_it_at_once(local: Scene) -> None:
    local.send("wait", ("long", 3_600.0))
    worker = local.work("--reload", "--lease", "3600").wait_ready()
    wait_until(local.runs, local.story)
    worker.signal_twice()
    assert worker.wait() == 0
    (record,) = local.records().values()
    assert (record.state, record.crashes) == (State.SCHEDULED, 0)


SHOP = """\
import os
import threading
from onefold import App

app = App()

@app.task
async def note(ctx, name: str) -> None: ...

@app.task(isolate=True)
def apart(name: str, seconds: float) -> None: ...
"""


def shop(directory: Path, *lines: str) -> Path:
    """Make a project in its own directory."""
    directory.mkdir()
    (directory / "shop.py").write_text("\n".join([SHOP.replace("(ctx, ", "("), *lines]))
    return directory


def finished(worker: Running) -> int:
    return worker.process.wait(PATIENCE_SECONDS)


def test_files_named_like_the_standard_library_stop_no_worker(scene: Scene, tmp_path: Path) -> None:
    """Processes must not start with the project first on their path."""
    project = shop(tmp_path / "project")
    for name in ("queue", "email", "resource", "selectors", "uuid", "json"):
        (project / f"{name}.py").write_text("x = 1\n")
    scene.send("note", ("one",))
    scene.send("apart", ("two", 0.0))
    worker = scene.work("--until-idle", app="shop:app", cwd=project, program=INSTALLED)
    assert finished(worker) == 0, worker.printed
    assert scene.states() == {State.DONE: 2}, scene.story()


def test_an_app_that_changes_directory_is_found_by_its_processes(local: Scene, tmp_path: Path) -> None:
    """A process with a leftover thread ends nevertheless."""
    project = shop(tmp_path / "project", "os.chdir('/')", "threading.Thread(target=threading.Event().wait).start()")
    local.send("note", ("one",))
    local.send("apart", ("two", 0.0))
    worker = local.work("--until-idle", app="shop:app", cwd=project, program=INSTALLED)
    assert finished(worker) == 0, worker.printed
    assert local.states() == {State.DONE: 2}, local.story()


def test_an_app_with_a_thread_that_cannot_start_ends_with_its_error(local: Scene, tmp_path: Path) -> None:
    project = shop(
        tmp_path / "project", "threading.Thread(target=threading.Event().wait).start()", "app = App('sqlite://')"
    )
    worker = local.work(app="shop:app", cwd=project, program=INSTALLED)
    assert finished(worker) == 1, worker.printed
    assert "onefold:" in worker.printed


@pytest.mark.parametrize("task", ["fork", "fork_in_a_thread"])
def test_forks_of_a_worker_neither_go_on_nor_stop_it(local: Scene, task: str) -> None:
    """A fork that came back up the stack would share the worker's descriptors, and pass signals on to the worker."""
    ids = local.send(task, ("comes back",), ("is told to end",))
    worker = local.work("--lease", "3600", "--concurrency", "1").wait_ready()
    local.wait_ended()
    local.send("note", ("after",))
    local.wait_ended()
    results = [local.records()[one].result for one in ids]
    assert (local.states(), results) == ({State.DONE: 3}, [b'"70"', b'"-15"']), local.story()
    assert len({pid for pid, _ in local.run_places()}) == 1
    assert worker.stop() == 0
