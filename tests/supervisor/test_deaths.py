"""Processes that die, and the messages that they held."""

from __future__ import annotations

import signal

import pytest
from supervisor_scene import HERE, Scene, is_alive, wait_until

from onefold import State


@pytest.mark.parametrize(
    ("how", "said", "in_stack"),
    [("segfault", "SIGSEGV", "Segmentation fault"), ("abort", "SIGABRT", "Aborted"), ("exit", "exit code 0", "")],
)
def test_however_it_kills_its_process_a_message_is_quarantined(
    local: Scene, how: str, said: str, in_stack: str
) -> None:
    """Fault 20: exit 0 is no success either; the outcome is the same on every store."""
    _quarantine(local, how, said, in_stack)


def test_a_message_that_kills_its_process_is_quarantined_and_its_neighbours_are_not(scene: Scene) -> None:
    """Fault 20, C17: it is quarantined after three crashes, and no other message is blamed for them."""
    _quarantine(scene, "kill", "SIGKILL", "")


def _quarantine(scene: Scene, how: str, said: str, in_stack: str) -> None:
    scene.send("neighbour", *((f"n{number}",) for number in range(9)))
    (killer,) = scene.send("die", (how, 9))
    worker = scene.work("--until-idle")
    assert worker.wait() == 0, scene.story()
    (letter,) = scene.letters()
    assert (letter.id, letter.failure.reason, letter.crashes) == (killer, "quarantined", 3)
    assert said in letter.failure.error_message
    assert in_stack in letter.failure.stack
    assert ("in die" in letter.failure.stack) is bool(in_stack)
    assert scene.states() == {State.DONE: 9, State.DEAD: 1}, scene.story()
    # Its neighbours were running when it killed its first process, so they ran twice, the second time alone.
    assert scene.runs() == {"die": 3, **{f"neighbour:n{number}": 2 for number in range(9)}}
    assert {record.crashes for id_, record in scene.records().items() if id_ != killer} == {1}


def test_an_outcome_that_cannot_be_written_ends_no_process(scene: Scene) -> None:
    """It becomes a dead letter; no message beside it starts twice or is blamed."""
    scene.send("quick", *((f"{number}",) for number in range(20)))
    (bad,) = scene.send("later", (1e300,))
    scene.send("quick", *((f"{number}",) for number in range(20, 40)))
    worker = scene.work("--until-idle")
    assert worker.wait() == 0, scene.story()
    (letter,) = scene.letters()
    assert (letter.id, letter.failure.reason, letter.crashes) == (bad, "damaged", 0)
    assert scene.states() == {State.DONE: 40, State.DEAD: 1}, scene.story()
    assert set(scene.runs().values()) == {1}, scene.story()
    assert f"set_aside message_id={bad}" in worker.printed


def test_what_a_dead_process_had_only_fetched_comes_back_at_once(scene: Scene) -> None:
    """C15: it does not wait for the lease, which is an hour here, and no crash is counted."""
    before, after = ((f"{number}",) for number in range(300)), ((f"{number}",) for number in range(300, 700))
    scene.send("quick", *before)
    (killer,) = scene.send("die", ("kill", 0))
    scene.send("quick", *after)
    worker = scene.work("--until-idle", "--concurrency", "1", "--lease", "3600")
    assert worker.wait() == 0, scene.story()
    assert "handed_back" not in worker.printed
    records = scene.records()
    assert records.pop(killer).state is State.DEAD
    assert {(record.state, record.crashes) for record in records.values()} == {(State.DONE, 0)}


def test_a_dead_supervisor_takes_its_processes_along_and_nothing_is_lost(scene: Scene) -> None:
    """C15: they notice, finish their messages and hand back the rest; nothing waits for a lease, an hour here."""
    scene.send("wait", ("short", 1.0), ("long", 3_600.0))
    worker = scene.work("--processes", "2", "--concurrency", "1", "--lease", "3600", "--stop-after", "2").wait_ready()
    wait_until(lambda: len(scene.runs()) == 2, scene.story)
    children = worker.children()
    worker.signal(signal.SIGKILL)
    wait_until(lambda: not any(map(is_alive, children)), "the processes outlived their supervisor")
    short, long = sorted(scene.records().values(), key=lambda record: record.state is not State.DONE)
    assert (short.state, long.state, long.crashes, long.attempt) == (State.DONE, State.SCHEDULED, 0, 0)


def test_a_process_that_hangs_in_c_does_not_outlive_its_supervisor_for_long(local: Scene) -> None:
    """Fault 21: it holds the interpreter's lock and notices nothing; the kernel ends it within 16 seconds."""
    local.send("hold", ("for-ever", 3_600))
    worker = local.work("--lease", "3600").wait_ready()
    wait_until(local.runs, local.story)
    (hanging,) = worker.children()
    worker.signal(signal.SIGKILL)
    assert worker.wait() == -signal.SIGKILL
    wait_until(lambda: not is_alive(hanging), "the process outlived its supervisor")


def test_threads_and_a_changed_directory_have_no_effect_on_others(local: Scene) -> None:
    """Fault 21: the process continues, its successor starts where the supervisor is, and a stop waits for no thread."""
    local.send("wander", ())
    local.send("note", ("a",), ("b",))
    worker = local.work("--max-messages", "3", "--concurrency", "1").wait_ready()
    (first,) = worker.children()
    local.wait_ended()
    wait_until(lambda: not is_alive(first), local.story)
    local.send("note", ("c",))
    local.wait_ended()
    assert local.effects() == {"a": 1, "b": 1, "c": 1}
    (wanderer, elsewhere), (_, other), _, (successor, here) = local.run_places()
    assert (wanderer, elsewhere, other) == (first, str(HERE), "/")
    assert (successor != first, here) == (True, str(HERE))
    assert worker.stop() == 0
    assert "was killed" not in worker.printed
