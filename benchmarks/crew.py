"""Worker processes, from start to end."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_START_SECONDS = 30.0


class WorkerDiedError(Exception):
    """A worker ended by itself; the text is the end of what it said."""


class Crew:
    """Workers that are connected and wait for the word."""

    def __init__(self, processes: list[Process], log: Path) -> None:
        self._processes = processes
        self._log = log

    def begin(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(b"begin\n")

    def check(self) -> None:
        if any(process.returncode is not None for process in self._processes):
            raise WorkerDiedError(self.said())

    def said(self) -> str:
        return self._log.read_text(errors="replace")[-2000:].strip()


@asynccontextmanager
async def hired(number: int, directory: Path, *arguments: str) -> AsyncIterator[Crew]:
    """Start workers, wait until all of them are connected, and end them with the block."""
    log = directory / "workers.log"
    processes: list[Process] = []
    try:
        with log.open("wb") as output:
            for slot in range(number):
                process = await _start(output.fileno(), directory, *arguments, str(slot))
                processes.append(process)
        crew = Crew(processes, log)
        async with asyncio.timeout(_START_SECONDS):
            for process in processes:
                await _connected(process, crew)
        yield crew
    finally:
        for process in processes:
            await _end(process)


async def _start(log: int, directory: Path, *arguments: str) -> Process:
    # What a worker leaves in the directory for temporary files goes with the benchmark's own.
    environment = {**os.environ, "TMPDIR": str(directory)}
    command = (sys.executable, "-m", "benchmarks.worker", *arguments)
    return await asyncio.create_subprocess_exec(
        *command, stdin=PIPE, stdout=PIPE, stderr=log, cwd=_ROOT, env=environment
    )


async def _connected(process: Process, crew: Crew) -> None:
    assert process.stdout is not None
    if not await process.stdout.readline():
        raise WorkerDiedError(crew.said())


async def _end(process: Process) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(5):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
