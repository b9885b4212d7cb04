"""The worker's side of the pipe to a process of isolated handlers, against processes that break the protocol."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import pytest

from onefold import limits
from onefold.clock import give_way
from onefold.handlers.threads import BusyError
from onefold.isolation import frames
from onefold.isolation import process as cell
from onefold.isolation.frames import AskedFrame, BegunFrame, FailedFrame, ReadyFrame, ReturnedFrame, RunFrame
from onefold.isolation.process import CrashedError, IsolatedProcess, UnfitError
from onefold.message.envelope import Envelope
from onefold.store import Lease

#: The beginning of each process of these tests: it has the pipe and helpers to write frames.
_PEER = """\
import os, signal, socket, sys
from onefold.isolation import frames
from onefold.isolation.frames import *
line = socket.socket(fileno=int(sys.argv[2]))
def say(*said):
    for one in said:
        line.sendall(frames.write(one) if not isinstance(one, bytes) else one)
def hear():
    head = line.recv(4, socket.MSG_WAITALL)
    return frames.read(line.recv(frames.length_of(head), socket.MSG_WAITALL))
"""
#: A process that does two runs, with an extra frame during the second.
_TWO_RUNS = """\
say(ReadyFrame())
run = hear().run
say(BegunFrame(run), ReturnedFrame(run, b'"first"', [], []))
run = hear().run
"""


def run_frame() -> RunFrame:
    envelope = Envelope(
        id="1", message_type="t", queue="q", idempotency_key="k", correlation_id="c", causation_id="c", subject="s"
    )
    return RunFrame(0, "module", "t", Lease(envelope, 1, 1, 0, 0, 0, "worker"), 0, 0, "")


def become(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Run this program instead of the real one in every process."""

    def command(_: str, *arguments: str) -> list[str]:
        return [sys.executable, "-c", _PEER + program, *arguments]

    monkeypatch.setattr(cell, "command", command)


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    return partial(become, monkeypatch)


async def _answer(asked: AskedFrame) -> NoReturn:
    raise AssertionError(f"{asked} was answered")


async def finish(process: IsolatedProcess) -> ReturnedFrame | FailedFrame:
    return await process.finish(_answer, lambda said: None)


async def second_run() -> ReturnedFrame | FailedFrame:
    """Do two runs in a process, and return the answer to the second."""
    process = await IsolatedProcess.start(os.getcwd())
    try:
        await process.begin(run_frame())
        assert await finish(process) == ReturnedFrame(1, b'"first"', [], [])
        await process.begin(run_frame())
        return await finish(process)
    finally:
        await process.kill()


async def an_answer_of_another_run_is_refused(peer: Callable[[str], None]) -> None:
    """After the second run has begun, the process repeats the answer of the first."""
    peer(_TWO_RUNS + "say(BegunFrame(run), ReturnedFrame(run - 1, b'\"first\"', [], [])); signal.pause()")
    with pytest.raises(UnfitError, match="in run 2 the process sent ReturnedFrame of run 1"):
        await second_run()


def test_an_answer_of_another_run_is_refused(peer: Callable[[str], None]) -> None:
    """Otherwise the second message would be settled with the first one's result."""
    asyncio.run(an_answer_of_another_run_is_refused(peer))


@pytest.mark.parametrize(
    "said",
    [
        "ReturnedFrame(run - 1, b'1', [], [])",
        "ReturnedFrame(run, b'1', [], [])",
        "FailedFrame(run - 1, 'failed', 'ValueError', '')",
        "AskedFrame(run - 1, 1, 'execute', 'DELETE FROM effect')",
        "ToldFrame(run - 1, 50.0, '')",
        "BegunFrame(run - 1)",
        "ReadyFrame()",
    ],
)
def test_a_process_that_speaks_before_it_begins_is_unfit(peer: Callable[[str], None], said: str) -> None:
    """Only the beginning of this very run may come now."""
    peer(f"{_TWO_RUNS}say({said}); signal.pause()")
    with pytest.raises(UnfitError):
        asyncio.run(second_run())


@pytest.mark.parametrize(
    "said",
    [
        "AskedFrame(run - 1, 1, 'execute', 'DELETE FROM effect')",
        "ToldFrame(run - 1, 50.0, '')",
        "BegunFrame(run)",
        "ReadyFrame()",
    ],
)
def test_nothing_is_done_for_a_run_that_is_over(peer: Callable[[str], None], said: str) -> None:
    """Otherwise a statement of an earlier run would be part of this run's commit."""
    peer(f"{_TWO_RUNS}say(BegunFrame(run), {said}); signal.pause()")
    with pytest.raises(UnfitError):
        asyncio.run(second_run())


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("frames.LENGTH.pack(2**31)", "a frame of 2147483648 bytes, where"),
        ("frames.LENGTH.pack(3) + b'no!'", "no frame"),
        ("b'INFO ready'", "bytes, where"),
    ],
)
def test_what_is_no_frame_is_a_crash_and_takes_no_memory(peer: Callable[[str], None], said: str, told: str) -> None:
    """The length of a frame is bounded where it is read, as where it is written."""
    peer(f"{_TWO_RUNS}say(BegunFrame(run), {said}); signal.pause()")
    with pytest.raises(CrashedError, match=told):
        asyncio.run(second_run())


def test_a_process_that_closes_its_line_and_lives_on_is_a_crash(
    peer: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its error output is kept as the reason."""
    monkeypatch.setattr(limits, "HANDLER_GRACE", 0.2)
    peer(_TWO_RUNS + "say(BegunFrame(run)); os.write(int(sys.argv[3]), b'last words'); line.close(); signal.pause()")
    with pytest.raises(CrashedError, match="closed its worker's line") as raised:
        asyncio.run(second_run())
    assert raised.value.evidence == "last words"


@pytest.mark.parametrize(
    ("program", "step"),
    [
        ("signal.pause()", "start"),
        ("say(ReadyFrame()); signal.pause()", "begin"),
        ("say(ReadyFrame()); line.close()", "begin"),
    ],
)
def test_neither_a_start_nor_a_beginning_takes_for_ever(
    peer: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, program: str, step: str
) -> None:
    """Both are bounded in time."""
    for name in ("ISOLATED_BEGIN_SECONDS", "HANDLER_GRACE"):
        monkeypatch.setattr(limits, name, 0.2)
    monkeypatch.setattr(limits, "ISOLATED_START_SECONDS", 0.2 if step == "start" else 60.0)
    peer(program)

    async def scenario() -> None:
        process = await IsolatedProcess.start(os.getcwd())
        try:
            await process.begin(run_frame())
        finally:
            await process.kill()

    with pytest.raises((BusyError, CrashedError)):
        asyncio.run(scenario())


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def refuse(*_: Any, **__: Any) -> NoReturn:
    raise OSError(errno.EMFILE, "too many open files")


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="descriptors are counted in /proc, which Linux has")
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (cell, "unnamed_file"),
        (socket, "socketpair"),
        (asyncio, "open_connection"),
        (subprocess, "Popen"),
        (threading, "Thread"),
    ],
)
def test_a_start_that_fails_is_busy_and_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    """A lack of descriptors, memory or processes is no failure of the message that would have run."""

    async def scenario() -> int:
        before = descriptors()
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, refuse)
            with pytest.raises(BusyError, match="too many open files"):
                await IsolatedProcess.start(os.getcwd())
        await give_way()
        return descriptors() - before

    assert asyncio.run(scenario()) == 0


def test_nothing_is_needed_of_a_temporary_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file system may be read-only."""
    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)

    async def scenario() -> None:
        process = await IsolatedProcess.start(os.getcwd())
        await process.dismiss()

    if hasattr(os, "memfd_create"):
        asyncio.run(scenario())


def test_frames_of_runs_name_their_run() -> None:
    """Every frame about a run has the run's number."""
    said = [kind for kind in frames.Frame.__args__ if kind not in (ReadyFrame, frames.AnsweredFrame)]
    assert all("run" in kind.__struct_fields__ for kind in said)
    assert BegunFrame(1) != BegunFrame(2)
