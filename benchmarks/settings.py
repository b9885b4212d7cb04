"""The settings that a reader needs to repeat the run: the machine without its name, the versions, the sizes."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence

import psutil

from benchmarks import agent, loop, raw_postgres, raw_sqlite, small
from benchmarks.engines import Engine
from benchmarks.measures import claiming, costs, latency, neighbours, resources, sending
from benchmarks.noise import NOISES
from benchmarks.peers import PEERS
from benchmarks.place import Scale
from benchmarks.plan import NEIGHBOURS, RESULTS


def describe(scale: Scale, engines: Sequence[Engine], peers: Sequence[str]) -> dict[str, list[str]]:
    """Return the settings by page, one sentence each."""
    common = [
        f"{os.cpu_count()} cores, {platform.machine()}, {psutil.virtual_memory().total / 2**30:.0f} GiB, "
        f"{platform.system()} {platform.release().partition('-')[0]}, Python {platform.python_version()}, {loop.NAME}; "
        "senders, workers and servers share them.",
        *(f"{engine.settings()}." for engine in engines),
        f"Peers: {', '.join(PEERS[name].versions for name in peers) or 'none'}.",
        "Payload about 100 bytes; every message of ours has a key, and its result is kept.",
    ]
    return {RESULTS: [*common, *_of_results(scale)], NEIGHBOURS: [*common, *_of_neighbours(scale)]}


def _of_results(scale: Scale) -> list[str]:
    drains = f"Drains last {scale.drain_seconds:g} s" if scale.drain_seconds else "Drains are a few thousand messages"
    return [
        f"Rounds: {scale.rounds}; figures are medians, a ratio is the median of the rounds' ratios.",
        f"S1 to S3 send for {scale.send_seconds:g} s, S3 in calls of {agent.BULK:,}; S2 has {sending.SENDERS} senders.",
        f"{drains}; raw claims {raw_sqlite.CLAIM} (SQLite) and {raw_postgres.CLAIM} (PostgreSQL) at once, "
        f"and runs S6 and S7 on PostgreSQL over {raw_postgres.CONNECTIONS} connections.",
        f"S8 sends {latency.PER_SECOND}/s for {scale.latency_seconds:g} s, S9 watches for {scale.idle_seconds:g} s, "
        f"S10 keeps {scale.kept_messages:,} ended messages, S12 sends {claiming.FOREIGN_PER_SECOND:,}/s for "
        f"{scale.foreign_seconds:g} s, S13 runs {resources.RUNNING:,} handlers.",
    ]


def _of_neighbours(scale: Scale) -> list[str]:
    return [
        *(f"{noise.code}: {noise.describe(scale.noise_share)}." for noise in NOISES),
        f"Latencies are of {scale.neighbour_sends} messages, at gates of half as many; drains are of "
        f"{neighbours.DRAINED:,} messages, {scale.neighbour_drains} times; sends go on for "
        f"{scale.neighbour_seconds:g} s with pauses of {1e3 * neighbours.BUSY_PAUSE_SECONDS:g} ms; an idle worker is "
        f"watched for {scale.watch_seconds:g} s.",
        f"C1 sends {costs.SINGLE:,} messages one by one and {costs.MANY:,} in calls of {agent.BULK:,}, and drains all; "
        f"C2 drains {costs.SOME:,}, C3 {costs.RUNS:,} runs; C4 sends {costs.MANY:,} in one call, drains "
        f"{costs.SOME:,} with a row and {costs.SOME:,} at gates, with {small.CONCURRENCY} handlers at once, and runs "
        f"{costs.RUN_STEPS:,} steps in one run; also with --quick, because some costs grow with the store.",
    ]
