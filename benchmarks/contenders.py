"""The contenders by name, and how their processes are started."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks import environment
from benchmarks.contender import Mode
from benchmarks.peers import PEERS
from benchmarks.processes import Launch

OURS = "onefold"
RAW = "raw"

_WHERE = {
    (OURS, "sqlite"): "benchmarks.ours:Onefold",
    (OURS, "postgres"): "benchmarks.ours:Onefold",
    (RAW, "sqlite"): "benchmarks.raw_sqlite:RawSQLite",
    (RAW, "postgres"): "benchmarks.raw_postgres:RawPostgres",
}
#: Modes for which onefold has an app with more tasks than one.
_APPS = {
    Mode.NOISY: "benchmarks.noisy:Noisy",
    Mode.QUEUES: "benchmarks.noisy:Noisy",
    Mode.SMALL: "benchmarks.small:Small",
}
_NODE_AGENT = Path(__file__).parent / "peers" / "agent.mjs"


def launch(store: str, name: str, mode: Mode, url: str) -> Launch:
    """Return the command that starts a contender, by its names."""
    if name not in PEERS:
        where = _APPS.get(mode) if name == OURS else None
        return _python(sys.executable, where or _WHERE[name, store], mode, url)
    peer = PEERS[name]
    if not peer.modules:
        return _python(str(environment.python_of(peer)), peer.where, mode, url)
    module = (_NODE_AGENT.parent / peer.where).as_uri()
    directory = str(environment.DIRECTORY / peer.name)
    return Launch((str(environment.node_of(peer)), str(_NODE_AGENT), module, url), {"PEER_DIRECTORY": directory})


def _python(interpreter: str, where: str, mode: Mode, url: str) -> Launch:
    return Launch((interpreter, "-m", "benchmarks.agent", where, mode, url), {})
