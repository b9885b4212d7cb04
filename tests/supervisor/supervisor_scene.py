"""A store, an app with harmful handlers, and ``onefold worker`` on it as an operator would start it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from onefold import App, Query, State
from onefold.operations.dead_letters import DeadLetter
from onefold.store import Record

Answer = TypeVar("Answer")

#: Long enough for a busy machine; a passing test does not wait this long.
PATIENCE_SECONDS = 60.0
HERE = Path(__file__).parent


def wait_until(true: Callable[[], object], what: str | Callable[[], str]) -> None:
    give_up_at = time.monotonic() + PATIENCE_SECONDS
    while not true():
        assert time.monotonic() < give_up_at, what if isinstance(what, str) else what()
        time.sleep(0.1)


def is_alive(pid: int) -> bool:
    """Whether a process exists and is not a zombie that waits to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Running:
    """One ``onefold worker``: the supervisor's process and its output."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self._log = log

    @property
    def printed(self) -> str:
        return self._log.read_text()

    def wait_ready(self) -> Running:
        wait_until(lambda: " ready" in self.printed or self.process.poll() is not None, "it did not start")
        assert " ready" in self.printed, self.printed
        return self

    def children(self) -> list[int]:
        """The process ids of its children."""
        pid = self.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def family(self) -> list[int]:
        """The process ids of it and all processes below it, as a service manager sees them."""
        found = [self.process.pid]
        for pid in found:
            with suppress(FileNotFoundError, ProcessLookupError):
                for thread in Path(f"/proc/{pid}/task").iterdir():
                    found += map(int, (thread / "children").read_text().split())
        return found

    def signal_all(self, number: int) -> None:
        """Signal every process at once, as a service manager does."""
        for pid in self.family():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def interrupt(self, pid: int) -> None:
        """Send one process the signal that Ctrl-C sends to the whole group."""
        os.kill(pid, signal.SIGINT)

    def wait(self) -> int:
        return self.process.wait(PATIENCE_SECONDS)

    def terminate(self) -> None:
        """Ask it to stop."""
        self.signal(signal.SIGTERM)

    def signal_twice(self) -> None:
        """Ask it to stop, and then to stop at once."""
        self.terminate()
        wait_until(lambda: "stopping" in self.printed, lambda: self.printed)
        self.terminate()

    def stop(self) -> int:
        """Stop it gracefully and return its exit code."""
        self.terminate()
        return self.wait()


class Scene:
    """A migrated store with a table for effects, and the workers on it."""

    def __init__(self, url: str, directory: Path) -> None:
        self.url = url
        self.directory = directory
        self.runs_file = directory / "runs"
        self.runs_file.touch()
        self.workers: list[Running] = []
        self._loop = asyncio.new_event_loop()
        self.app = App(url)
        self._loop.run_until_complete(self._prepare())

    async def _prepare(self) -> None:
        # The tasks are declared in a module that the worker can find; here they are only sent.
        import supervised_app

        self.app.registry = supervised_app.app.registry
        await self.app.migrate()
        await self.app.open()
        async with self.app.transaction() as transaction:
            await transaction.execute("CREATE TABLE effect (name TEXT)")

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "ONEFOLD_URL": self.url, "RUNS": str(self.runs_file), "PYTHONUNBUFFERED": "1"}

    def work(
        self,
        *options: str,
        app: str = "supervised_app:app",
        cwd: Path = HERE,
        program: Sequence[str] = (sys.executable, "-m", "onefold"),
        errors: int | None = None,
        **variables: str,
    ) -> Running:
        """Start ``onefold worker``; its standard error goes to its log, or to ``errors`` if given."""
        log = self.directory / f"worker-{len(self.workers)}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*program, "worker", app, *options],
                cwd=cwd,
                stdout=output,
                stderr=output if errors is None else errors,
                env={**self.environment, **variables},
                # A signal that is ignored here, as under nohup, would be ignored there as well.
                preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
            )
        self.workers.append(Running(process, log))
        return self.workers[-1]

    def onefold(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run another command to its end."""
        command = [sys.executable, "-m", "onefold", *arguments]
        return subprocess.run(
            command, cwd=HERE, env=self.environment, capture_output=True, text=True, timeout=60, check=False
        )

    def ask(self, question: Callable[[App], Awaitable[Answer]]) -> Answer:
        """Run a coroutine function with an open app, and return its result."""

        async def ask() -> Answer:
            return await question(self.app)

        return self._loop.run_until_complete(ask())

    def send(self, task: str, *calls: Sequence[Any]) -> list[str]:
        """Send one message for each tuple of arguments, in this order; return their ids."""
        declared = self.app.tasks[task]
        receipts = self.ask(lambda app: app.send_many(declared.call(*arguments) for arguments in calls))
        return [receipt.id for receipt in receipts]

    def records(self) -> dict[str, Record]:
        found = self.ask(lambda app: app.find(Query(limit=1_000)))
        return {record.envelope.id: record for record in found}

    def states(self) -> Counter[State]:
        return Counter(record.state for record in self.records().values())

    def wait_ended(self) -> None:
        """Wait until no message is alive."""
        wait_until(lambda: all(record.state.ended for record in self.records().values()), self.story)

    def letters(self) -> list[DeadLetter]:
        async def collect(app: App) -> list[DeadLetter]:
            return [letter async for letter in app.dead_letters()]

        return self.ask(collect)

    def effects(self) -> Counter[str]:
        rows = self.ask(lambda app: app.store.fetch("SELECT name FROM effect"))
        return Counter(row[0] for row in rows)

    def runs(self) -> Counter[str]:
        """How often each handler began, by its name."""
        return Counter(line.split()[0] for line in self.runs_file.read_text().splitlines())

    def run_places(self) -> list[tuple[int, str]]:
        """The process and the directory in which each handler began."""
        lines = self.runs_file.read_text().splitlines()
        return [(int(pid), directory) for _, pid, directory in map(str.split, lines)]

    def story(self) -> str:
        """All output and state that helps to find out what went wrong."""
        logs = "\n".join(f"--- worker {n}\n{worker.printed}" for n, worker in enumerate(self.workers))
        return f"{self.states()}\n{self.runs().most_common(20)}\n{logs}"

    def close(self) -> None:
        self._loop.run_until_complete(self.app.close())
        self._loop.close()
        for worker in self.workers:
            if worker.process.poll() is None:
                below = worker.children()
                worker.process.kill()
                worker.process.wait()
                for child in below:
                    # The children notice by themselves; a failed test does not wait for that.
                    with suppress(ProcessLookupError):
                        os.kill(child, signal.SIGKILL)
