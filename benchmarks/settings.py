"""The settings that a reader needs to repeat the run: the machine without its name, the versions, the sizes."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable

import psutil

from benchmarks import agent, loop, raw_postgres, raw_sqlite
from benchmarks.engines import Engine
from benchmarks.measures import claiming, latency, resources, sending
from benchmarks.peers import PEERS
from benchmarks.place import Scale


def describe(scale: Scale, engines: Iterable[Engine], peers: Iterable[str]) -> list[str]:
    """Return the settings, one sentence each."""
    drains = f"Drains last {scale.drain_seconds:g} s" if scale.drain_seconds else "Drains are a few thousand messages"
    return [
        f"{os.cpu_count()} cores, {platform.machine()}, {psutil.virtual_memory().total / 2**30:.0f} GiB, "
        f"{platform.system()} {platform.release().partition('-')[0]}, Python {platform.python_version()}, {loop.NAME}; "
        "senders, workers and servers share them.",
        *(f"{engine.settings()}." for engine in engines),
        f"Peers: {', '.join(PEERS[name].versions for name in peers) or 'none'}.",
        f"Rounds: {scale.rounds}; figures are medians, a ratio is the median of the rounds' ratios.",
        "Payload about 100 bytes; every message of ours has a key, and its result is kept.",
        f"S1 to S3 send for {scale.send_seconds:g} s, S3 in calls of {agent.BULK:,}; S2 has {sending.SENDERS} senders.",
        f"{drains}; raw claims {raw_sqlite.CLAIM} (SQLite) and {raw_postgres.CLAIM} (PostgreSQL) at once, "
        f"and runs S6 and S7 on PostgreSQL over {raw_postgres.CONNECTIONS} connections.",
        f"S8 sends {latency.PER_SECOND}/s for {scale.latency_seconds:g} s, S9 watches for {scale.idle_seconds:g} s, "
        f"S10 keeps {scale.kept_messages:,} ended messages, S12 sends {claiming.FOREIGN_PER_SECOND:,}/s for "
        f"{scale.foreign_seconds:g} s, S13 runs {resources.RUNNING:,} handlers.",
    ]
