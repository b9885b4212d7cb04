"""A supervisor as operators and probes see it: health, the list of workers, reasons for a failed start."""

from __future__ import annotations

import http.client
import json
import os
import re
import resource
import signal
import socket
import sys
from typing import Any

import pytest
from supervisor_scene import Scene, wait_until

from onefold import State
from onefold.worker.worker_list import workers


def _ask(port: int, path: str, method: str = "GET") -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        text = answer.read()
        return answer.status, json.loads(text) if text else None
    finally:
        connection.close()


def test_health_says_whether_messages_are_handled(local: Scene) -> None:
    worker = local.work("--processes", "2", "--health", "127.0.0.1:0").wait_ready()
    found = re.search(r"health at http://127.0.0.1:(\d+)/live", worker.printed)
    assert found is not None, worker.printed
    port = int(found[1])
    status, report = _ask(port, "/ready")
    assert (status, report["ready"], report["live"]) == (200, True, True)
    assert sorted(one["pid"] for one in report["workers"]) == sorted(worker.children())
    assert _ask(port, "/live")[0] == 200
    assert _ask(port, "/ready", "HEAD") == (200, None)
    assert _ask(port, "/metrics")[0] == 404
    assert _ask(port, "/live", "POST")[0] == 405
    local.send("wait", ("long", 3.0))
    wait_until(lambda: sum(one["running"] for one in _ask(port, "/live")[1]["workers"]) == 1, local.story)
    worker.terminate()
    # Still alive but no longer ready: a load balancer should send its work elsewhere.
    wait_until(lambda: "stopping" in worker.printed, local.story)
    assert _ask(port, "/ready")[0] == 503
    assert _ask(port, "/live")[0] == 200
    assert worker.wait() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="sets the limit of another process")
def test_a_flood_of_silent_connections_takes_no_descriptors_from_workers(local: Scene) -> None:
    """With more connections than it has descriptors, probes are answered and a dead worker is replaced.

    The log gets a few lines about it, not one for each connection.
    """
    worker = local.work("--health", "127.0.0.1:0").wait_ready()
    found = re.search(r"health at http://127.0.0.1:(\d+)/live", worker.printed)
    assert found is not None, worker.printed
    port = int(found[1])
    resource.prlimit(worker.process.pid, resource.RLIMIT_NOFILE, (64, 64))
    (first,) = worker.children()
    silent: list[socket.socket] = []
    try:
        for number in range(200):
            silent.append(socket.create_connection(("127.0.0.1", port), timeout=10))
            silent[-1].sendall(b"GET /")
            if number == 100:
                os.kill(first, signal.SIGKILL)
        assert _ask(port, "/live")[0] == 200
        wait_until(lambda: worker.children() not in ([], [first]), local.story)
        wait_until(lambda: _ask(port, "/ready")[0] == 200, local.story)
    finally:
        for one in silent:
            one.close()
    assert worker.stop() == 0
    assert "Traceback" not in worker.printed
    assert "health_crowded" in worker.printed
    assert len(worker.printed.splitlines()) < 20, worker.printed


def test_an_address_that_is_none_is_refused(local: Scene) -> None:
    worker = local.work("--health", "8080")
    assert worker.wait() == 1
    assert "HOST:PORT" in worker.printed
    assert "Traceback" not in worker.printed


def test_processes_that_cannot_start_end_the_supervisor_with_the_reason(local: Scene) -> None:
    """The reason is shown once, not once per process and attempt."""
    worker = local.work("--processes", "2", BROKEN="1")
    assert worker.wait() == 1
    assert worker.printed.count('raise RuntimeError("the lifespan is broken")') == 1
    assert "no worker process can start: RuntimeError: the lifespan is broken" in worker.printed


def test_workers_lists_the_live_workers_and_the_messages_they_hold(scene: Scene) -> None:
    (id_,) = scene.send("wait", ("long", 3_600.0))
    worker = scene.work("--processes", "2", "--queue", "default").wait_ready()
    wait_until(scene.runs, scene.story)

    wait_until(lambda: len(scene.ask(lambda app: workers(app.store))) == 2, scene.story)
    answer = scene.onefold("workers", "supervised_app:app", "--held", "--json")
    assert answer.returncode == 0, answer.stderr
    fleet: list[dict[str, Any]] = json.loads(answer.stdout)
    assert sorted(one["pid"] for one in fleet) == sorted(worker.children())
    assert {one["parent"] for one in fleet} == {worker.process.pid}
    assert {(one["lane"], *one["queues"]) for one in fleet} == {("main", "default")}
    (held,) = [message for one in fleet for message in one["held"]]
    assert (held["id"], held["message_type"], held["attempt"]) == (id_, "wait", 1)
    table = scene.onefold("workers", "--held")
    assert table.returncode == 0, table.stderr
    assert all(one["name"] in table.stdout for one in fleet)
    assert id_ in table.stdout
    # The messages a worker holds are read now; beside them is the count from its last report.
    assert "holds now" in table.stdout
    assert "ran when seen" in table.stdout
    # Stopped workers are no longer listed.
    worker.signal_twice()
    assert worker.wait() == 0
    assert "no workers" in scene.onefold("workers").stderr


def test_restored_shuts_out_running_workers(scene: Scene) -> None:
    """After a restore from backup no worker from before may write."""
    scene.send("neighbour", ("first-run-is-long",))
    worker = scene.work("--lease", "5").wait_ready()
    wait_until(scene.runs, scene.story)
    refused = scene.onefold("restored", "--actor", "ada", "--reason", "backup of Monday")
    assert refused.returncode == 1
    assert "Aborted" in refused.stderr
    done = scene.onefold("restored", "--actor", "ada", "--reason", "backup of Monday", "--yes")
    assert (done.returncode, "1 leases ended" in done.stdout) == (0, True), done.stderr
    wait_until(lambda: sum(scene.runs().values()) == 2, scene.story)
    scene.wait_ended()
    assert scene.states() == {State.DONE: 1}
    wait_until(lambda: "lease_lost" in worker.printed, scene.story)
    (note,) = scene.ask(lambda app: app.store.entries("restored")).values()
    assert json.loads(note.value) == {"actor": "ada", "reason": "backup of Monday"}
    assert worker.stop() == 0
