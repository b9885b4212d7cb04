"""Signals to a supervisor: nothing is lost, whatever the order."""

from __future__ import annotations

import time

from supervisor_scene import Scene, wait_until

from onefold import State


def test_a_stop_lets_what_runs_finish_and_hands_back_the_rest(scene: Scene) -> None:
    """Fault 40, C30."""
    scene.send("wait", *((f"{number}", 1.0) for number in range(6)))
    worker = scene.work("--processes", "2", "--concurrency", "1", "--lease", "3600").wait_ready()
    wait_until(lambda: len(scene.runs()) == 2, scene.story)
    assert worker.stop() == 0
    assert scene.states() == {State.DONE: 2, State.SCHEDULED: 4}
    assert {record.crashes for record in scene.records().values()} == {0}
    assert "2 messages settled" in worker.printed


def test_a_second_signal_ends_it_at_once_and_blames_no_message(scene: Scene) -> None:
    """Fault 40: the processes are killed, and their messages are handed back rather than left to their leases."""
    scene.send("wait", ("long", 3_600.0))
    worker = scene.work("--lease", "3600").wait_ready()
    wait_until(scene.runs, scene.story)
    started = time.monotonic()
    worker.signal_twice()
    assert worker.wait() == 0
    assert time.monotonic() - started < 10.0
    (record,) = scene.records().values()
    assert (record.state, record.crashes, record.attempt) == (State.SCHEDULED, 0, 0)


def test_a_handler_that_does_not_stop_is_killed_when_the_time_is_over(local: Scene) -> None:
    """Fault 40: it may ignore its cancellation; its message is handed back all the same."""
    local.send("endless", ())
    worker = local.work("--stop-after", "0.5", "--lease", "3600").wait_ready()
    wait_until(local.runs, local.story)
    assert worker.stop() == 0
    assert "did not stop in time" in worker.printed
    (record,) = local.records().values()
    assert (record.state, record.crashes, record.attempt) == (State.SCHEDULED, 0, 0)


def test_a_handler_that_holds_the_interpreter_is_killed_when_the_time_is_over(local: Scene) -> None:
    local.send("hold", ("long", 3_600))
    worker = local.work("--stop-after", "0.5", "--lease", "3600").wait_ready()
    wait_until(local.runs, local.story)
    assert worker.stop() == 0
    (record,) = local.records().values()
    assert (record.state, record.crashes, record.attempt) == (State.SCHEDULED, 0, 0)


def test_ctrl_c_reaches_the_whole_group_and_stops_it_gracefully(local: Scene) -> None:
    local.send("wait", ("one", 1.0))
    worker = local.work("--lease", "3600").wait_ready()
    wait_until(local.runs, local.story)
    for pid in (worker.process.pid, *worker.children()):
        worker.interrupt(pid)
    assert worker.wait() == 0
    assert local.states() == {State.DONE: 1}
