"""The contenders' processes as the measuring process sees them."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.contender import NotBuiltError

ROOT = Path(__file__).parents[1]
#: A command that takes longer has failed.
_ANSWER_SECONDS = 120.0
_END_SECONDS = 5.0
_LOG_CHARACTERS = 2_000
#: An answer is one line, which may hold minutes of claims with two figures each.
_LINE_BYTES_MAX = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Launch:
    """The command that starts a process of a contender."""

    command: tuple[str, ...]
    environment: dict[str, str]


class AgentError(Exception):
    """A contender failed or ended by itself; the text is its reason."""


class Agent:
    """One running process of a contender."""

    def __init__(self, process: Process, log: Path) -> None:
        self._process = process
        self._log = log

    async def ask(self, do: str, *, within: float = _ANSWER_SECONDS, **options: Any) -> Any:
        """Run a command in the process, and return its answer."""
        self.tell(do, **options)
        return await self.answer(within)

    def tell(self, do: str, **options: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **options}).encode() + b"\n")

    async def answer(self, within: float = _ANSWER_SECONDS) -> Any:
        assert self._process.stdout is not None
        async with asyncio.timeout(within):
            line = await self._process.stdout.readline()
        if not line:
            raise AgentError(self._last_words())
        said = json.loads(line)
        if "error" not in said:
            return said["answer"]
        if said["error"] == NotBuiltError.__name__:
            raise NotBuiltError(said["text"])
        raise AgentError(f"{said['error']}: {said['text']}")

    def check(self) -> None:
        """Raise if the process has ended, instead of waiting for it."""
        if self._process.returncode is not None:
            raise AgentError(self._last_words())

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace")[-_LOG_CHARACTERS:].split("\n")
        return next((line for line in reversed(lines) if line.strip()), "ended without a word")

    def tree(self) -> list[psutil.Process]:
        """Return it and all of its descendants."""
        process = psutil.Process(self._process.pid)
        return [process, *process.children(recursive=True)]

    def kill(self) -> None:
        """Kill it and all of its descendants."""
        with suppress(psutil.NoSuchProcess):
            for process in self.tree():
                process.kill()

    async def end(self) -> None:
        """Let it end by itself, as an agent does with its input; kill it if it does not."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(_END_SECONDS):
                await self._process.wait()
        except TimeoutError:
            self.kill()
            await self._process.wait()


@asynccontextmanager
async def started(how: Launch, directory: Path) -> AsyncIterator[Agent]:
    """Run one process for the length of the block."""
    number, name = tempfile.mkstemp(suffix=".log", dir=directory)
    with os.fdopen(number, "wb") as output:
        process = await asyncio.create_subprocess_exec(
            *how.command,
            stdin=PIPE,
            stdout=PIPE,
            stderr=output,
            cwd=ROOT,
            env={**os.environ, **how.environment},
            limit=_LINE_BYTES_MAX,
        )
    agent = Agent(process, Path(name))
    try:
        yield agent
    finally:
        await agent.end()


@asynccontextmanager
async def crew(how: Launch, directory: Path, boards: Sequence[Path]) -> AsyncIterator[list[Agent]]:
    """Run one worker per board for the length of the block; all are connected before the block begins."""
    async with AsyncExitStack() as stack:
        agents = [await stack.enter_async_context(started(how, directory)) for _ in boards]
        for agent, board in zip(agents, boards, strict=True):
            agent.tell("drain", board=str(board))
        for agent in agents:
            await agent.answer()
        for agent in agents:
            agent.tell("begin")
        yield agents
