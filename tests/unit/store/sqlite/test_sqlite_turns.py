"""Processes that write into one file without a pause take turns."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from onefold.clock import MICROSECONDS, SystemClock
from onefold.store.sqlite.writer import turns
from onefold.store.sqlite.writer.turns import Turns

SENDER = """
import asyncio, json, sys, time
from onefold import App

app = App(sys.argv[1])

@app.task(key="{number}")
async def note(number: str) -> None: ...

async def main() -> None:
    me, count = sys.argv[2], 0
    async with app:
        print("ready", flush=True)
        end = float(sys.stdin.readline())
        while time.time() < end:
            await note.send(f"{me}-{count}")
            count += 1
    print(json.dumps(count), flush=True)

asyncio.run(main())
"""


NOW = MICROSECONDS


def write(turn: Turns, times: int, *, micros: int = 100, version: int = 1) -> None:
    for _ in range(times):
        turn.begun(NOW, version)
        turn.ended(NOW + micros)


def test_a_process_that_is_alone_is_never_held_up() -> None:
    turn = Turns()
    write(turn, 1_000)
    assert not turn.is_over(NOW)


@pytest.mark.parametrize("seen", ["in the database", "by waiting"])
def test_beside_others_a_turn_ends_after_a_few_transactions(seen: str) -> None:
    turn = Turns()
    write(turn, 1)
    if seen == "by waiting":
        turn.had_to_wait(NOW)
    write(turn, turns.IN_A_ROW - 1, version=1 if seen == "by waiting" else 2)
    assert not turn.is_over(NOW)
    write(turn, 1, version=1 if seen == "by waiting" else 2)
    assert turn.is_over(NOW)
    assert not turn.is_over(NOW)


def test_a_long_transaction_is_a_turn() -> None:
    turn = Turns()
    turn.had_to_wait(NOW)
    write(turn, 1, micros=turns.HELD_MICROS)
    assert turn.is_over(NOW)


def test_others_that_write_no_more_are_forgotten() -> None:
    turn = Turns()
    turn.had_to_wait(NOW)
    write(turn, 100)
    assert not turn.is_over(NOW + turns.REMEMBERED_MICROS + 1)


@pytest.mark.deep
def test_eight_processes_that_send_one_by_one_send_about_as_many(tmp_path: Path) -> None:
    """None of them sends more than twice as many as another; before, one sent seven times as many."""
    url = f"sqlite:///{tmp_path}/shop.db"
    program = tmp_path / "sender.py"
    program.write_text(SENDER)
    processes = [
        subprocess.Popen(
            [sys.executable, str(program), url, str(number)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for number in range(8)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        until = SystemClock().now() / MICROSECONDS + 6
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(f"{until}\n")
            process.stdin.flush()
        sent = [json.loads(process.communicate(timeout=60)[0].splitlines()[-1]) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert max(sent) <= 2 * min(sent), sent
