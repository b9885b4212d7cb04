"""Processes that hang: their leases are renewed, and those that stay stuck are killed."""

from __future__ import annotations

import pytest
from supervisor_scene import Scene, wait_until

from onefold import State


def test_a_handler_that_holds_the_interpreter_past_the_lease_runs_once(scene: Scene) -> None:
    """Fault 21, C13: no thread of the process could renew its lease; the supervisor renews it from another process."""
    scene.send("hold", ("long", 5))
    first = scene.work("--lease", "1").wait_ready()
    wait_until(scene.runs, scene.story)
    beside = scene.work("--lease", "1").wait_ready()
    scene.wait_ended()
    assert scene.states() == {State.DONE: 1}
    assert scene.runs() == {"hold:long": 1}
    assert {record.crashes for record in scene.records().values()} == {0}
    assert (first.stop(), beside.stop()) == (0, 0)


@pytest.mark.alone
def test_a_thread_that_holds_the_interpreter_and_with_it_the_file_runs_once(local: Scene) -> None:
    """C13, fault 21: a thread can stop its process while that has the write lock, so that no process can renew.

    Owners have 0.3 s to renew afterwards.  A second process that keeps the lock for all of that time costs another
    message one takeover (decision 0028), never two, and never a second commit.
    """
    for name in range(6):
        local.send("quick", *((f"{name}-{number}",) for number in range(100)))
        # Two of them in a row are still shorter than a worker waits for the file when it starts.
        local.send("hold_in_a_thread", (f"{name}", 2))
    workers = [local.work("--lease", "1", "--processes", "2", "--concurrency", "50").wait_ready() for _ in range(2)]
    local.wait_ended()
    runs = local.runs()
    assert {runs[f"hold_in_a_thread:{name}"] for name in range(6)} == {1}, local.story()
    assert local.states() == {State.DONE: 606}
    assert {record.crashes for record in local.records().values()} <= {0, 1}
    assert [worker.stop() for worker in workers] == [0, 0]


def test_what_a_hanging_process_had_fetched_others_do_meanwhile(local: Scene) -> None:
    """C17: only the message it has started waits for it."""
    local.send("quick", *((f"{number}",) for number in range(300)))
    local.send("hold", ("long", 10))
    behind = local.send("quick", *((f"{number}",) for number in range(300, 600)))
    first = local.work("--lease", "2", "--concurrency", "1").wait_ready()
    wait_until(lambda: "hold:long" in local.runs(), local.story)
    fetched = [id_ for id_, record in local.records().items() if id_ in behind and record.state is State.LEASED]
    beside = local.work("--lease", "2").wait_ready()
    local.wait_ended()
    assert fetched
    assert set(local.runs().values()) == {1}, local.story()
    assert {record.crashes for record in local.records().values()} == {0}
    names, places = list(local.runs()), local.run_places()
    hanging = names.index("hold:long")
    others = [pid for pid, _ in places[hanging + 1 :]]
    assert len(others) == len(behind)
    assert places[hanging][0] not in others
    assert (first.stop(), beside.stop()) == (0, 0)


def test_an_event_loop_that_does_not_move_is_killed_and_its_stack_kept(local: Scene) -> None:
    """Fault 21: a message that hangs three processes is quarantined like one that kills them."""
    local.send("hold", ("for-ever", 3_600))
    worker = local.work("--stall-after", "2", "--lease", "3600", "--until-idle")
    assert worker.wait() == 0, local.story()
    (letter,) = local.letters()
    assert (letter.failure.reason, letter.crashes) == ("quarantined", 3)
    assert "had not moved" in letter.failure.error_message
    assert "in hold" in letter.failure.stack


def test_a_handler_that_ignores_its_timeout_is_killed_and_only_it_is_blamed(local: Scene) -> None:
    """C20, fault 21: it is cancelled first, then its process is killed; the other message counts no crash."""
    (guilty,) = local.send("stubborn", ())
    (innocent,) = local.send("neighbour", ("innocent",))
    worker = local.work("--lease", "3600")
    wait_until(lambda: local.runs()["neighbour:innocent"] == 2, local.story)
    records = local.records()
    assert (records[guilty].crashes, records[innocent].crashes) == (1, 0)
    wait_until(lambda: local.records()[innocent].state is State.DONE, local.story)
    assert "ran past its timeout" in worker.printed
