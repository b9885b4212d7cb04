"""A Redis server answers with too much or with nonsense; the worker lives and does its other work."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import pytest
import redis
from fault_scene import run, until

from onefold import App, TransportUnavailableError, limits
from onefold.brokers.admission import REFUSED
from onefold.brokers.redis import RedisTransport
from onefold.brokers.redis.portion import Portion

MIB = 1_048_576


def bulk(value: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(value), value)


def array(*items: bytes) -> bytes:
    return b"*%d\r\n" % len(items) + b"".join(items)


def read_of(entry: bytes) -> bytes:
    """Return an answer to XREADGROUP with one entry."""
    return array(array(bulk(b"in"), array(entry)))


def envelope(key: str) -> bytes:
    return json.dumps(
        {
            "envelope_version": 1,
            "id": key,
            "message_type": "t",
            "schema_version": 1,
            "correlation_id": "c",
            "causation_id": "c",
            "idempotency_key": key,
            "subject": "s",
            "created_at": "2026-01-01T00:00:00Z",
            "payload_inline": {"n": 1},
        }
    ).encode()


FIELDS = array(bulk(b"envelope"), bulk(b"{}"))
NOTHING = b"*-1\r\n"
SETTINGS = {b"appendonly": b"yes", b"appendfsync": b"always", b"maxmemory-policy": b"noeviction"}

#: By name, the command with a wrong answer, and the answer.
WRONG: dict[str, tuple[bytes, bytes]] = {
    "pending is a number": (b"XPENDING", b":5\r\n"),
    "pending is too short": (b"XPENDING", array(array(bulk(b"1-1")))),
    "pending has an id that is none": (b"XPENDING", array(array(bulk(b"\xff"), bulk(b"c"), b":1\r\n", b":1\r\n"))),
    "an error with escape sequences": (b"XPENDING", b"-ERR \x1b]0;own\x07 x\r2026-01-01 ERROR forged\r\n"),
    "claimed is a number": (b"XCLAIM", b":5\r\n"),
    "read is a number": (b"XREADGROUP", b":5\r\n"),
    "an id is a number": (b"XREADGROUP", read_of(array(b":7\r\n", FIELDS))),
    "an entry without fields": (b"XREADGROUP", read_of(array(bulk(b"1-1"), NOTHING))),
    "a value is a number": (b"XREADGROUP", read_of(array(bulk(b"1-1"), array(bulk(b"envelope"), b":5\r\n")))),
    "an id that is no text": (b"XREADGROUP", read_of(array(bulk(b"\xff\xfe"), FIELDS))),
    "an id with a line end": (b"XREADGROUP", read_of(array(bulk(b"1-1\x1b[2J\nforged"), FIELDS))),
    "a value of ten terabytes": (b"XREADGROUP", b"*1\r\n*2\r\n$2\r\nin\r\n*1\r\n$9999999999999\r\n"),
    "twenty thousand arrays in each other": (b"XREADGROUP", b"*1\r\n" * 20_000),
    "no protocol at all": (b"XREADGROUP", b"<html>\r\n"),
    "a size that is no number": (b"XREADGROUP", b"$forged\r\n"),
    "a line without an end": (b"XREADGROUP", b"+" + b"x" * 200_000 + b"\r\n"),
    "the settings are a number": (b"CONFIG", b":5\r\n"),
    "the answer to ping is an array": (b"PING", b"*1000\r\n" + NOTHING * 1_000),
}


class FakeRedis:
    """Answers as a Redis server with an empty stream does, except for one command."""

    def __init__(self) -> None:
        self.answers: dict[bytes, bytes] = {}
        self.asked: list[bytes] = []
        self.url = ""

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[None]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        async with server:
            self.url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
            yield

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                words = []
                for _ in range(int(line[1:])):
                    size = int((await reader.readline())[1:])
                    words.append((await reader.readexactly(size + 2))[:-2])
                writer.write(self._answer(words))
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    def _answer(self, words: list[bytes]) -> bytes:
        command = words[0].upper()
        self.asked.append(command)
        if command in self.answers:
            return self.answers[command]
        if command == b"CONFIG":
            return array(bulk(words[2]), bulk(SETTINGS.get(words[2], b"no")))
        if command == b"XPENDING":
            waits = b"XCLAIM" in self.answers
            return array(array(bulk(b"1-1"), bulk(b"c"), b":99999999\r\n", b":1\r\n")) if waits else b"*0\r\n"
        if command == b"XREADGROUP":
            return NOTHING
        return b"+PONG\r\n" if command == b"PING" else b"+OK\r\n"


@pytest.mark.parametrize(("command", "answer"), WRONG.values(), ids=WRONG.keys())
def test_an_answer_that_makes_no_sense_stops_nothing_but_the_intake(
    command: bytes, answer: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Each causes one typed error, logged once per outage, on one line; the worker's other work continues.

    When the server answers correctly again, entries are received again.
    """
    caplog.set_level(logging.WARNING)

    async def scenario() -> None:
        server = FakeRedis()
        async with server.serve():
            server.answers[command] = answer
            app = App("sqlite:///:memory:")
            app.receive(RedisTransport(server.url, group="g", wait=0.02), "in")
            ran: list[int] = []

            @app.task
            async def t(n: int) -> None:
                ran.append(n)

            async with app:
                working = asyncio.create_task(app.work())
                await until(lambda: _true(server.asked.count(command) >= 3))
                await t.send(7)
                await until(lambda: _true(7 in ran))
                assert not working.done()
                server.answers.clear()
                server.answers[b"XREADGROUP"] = read_of(
                    array(bulk(b"1-1"), array(bulk(b"envelope"), bulk(envelope("key"))))
                )
                await until(lambda: _true(1 in ran))
                app.stop_working()
                await working

    run(scenario)
    failures = [record.getMessage() for record in caplog.records if "transport_failed" in record.getMessage()]
    assert failures
    assert len(failures) == len(set(failures))
    assert all(line.isprintable() for line in failures), failures


async def _true(value: bool) -> bool:
    return value


def test_an_unreadable_answer_is_told_without_what_was_read() -> None:
    """It may be part of a message: only the kind of error is named, and the error has no cause with more."""

    async def scenario() -> None:
        server = FakeRedis()
        async with server.serve():
            server.answers[b"XREADGROUP"] = b"CANARY\r\n"
            one = RedisTransport(server.url, group="g", wait=0.02)
            with pytest.raises(
                TransportUnavailableError, match=r"its reply cannot be read \(InvalidResponse\)"
            ) as told:
                await one.pull("in", limit=10, lease=30.0)
            assert "CANARY" not in f"{told.value!r} {told.value.__cause__!r}"
            await one.close()

    run(scenario)


# too much data


def add(url: str, entries: Mapping[str, bytes] | bytes, times: int = 1) -> None:
    with redis.Redis.from_url(url) as client:
        for _ in range(times):
            client.xadd("in", entries if isinstance(entries, Mapping) else {"envelope": entries})


WORKER = """
import asyncio, resource, sys
from onefold import App
from onefold.brokers.redis import RedisTransport
from onefold.store.sqlite import SQLiteStore
SQLiteStore(":memory:")  # imports the engine
now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
# Thread stacks count as address space: 1 MiB each instead of the system's 8, so that they do not use up the bound.
import threading
threading.stack_size(1 << 20)
resource.setrlimit(resource.RLIMIT_AS, (now + int(sys.argv[3]),) * 2)
app = App(sys.argv[1])
app.receive(RedisTransport(sys.argv[2], group="g", wait=0.02), "in")
@app.task
async def t(n: int) -> None: print("ran", n)
async def main():
    async with app:
        await app.work(until_idle=True)
asyncio.run(main())
"""


#: The memory a process may use beside that at its start: threads, buffers, one pull.
ROOM = 80 * MIB
LARGE, LARGE_COUNT = 12 * MIB, 10


def work(url: str, redis_url: str) -> str:
    """Receive in a process with little memory; return its output."""
    done = subprocess.run(
        [sys.executable, "-c", WORKER, url, redis_url, str(ROOM)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        # Otherwise the allocator reserves 64 MiB of address space for each thread, whether it is used or not.
        env={**os.environ, "MALLOC_ARENA_MAX": "1"},
    )
    assert done.returncode == 0, done.stderr[-2_000:]
    return done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is set by what /proc tells")
@pytest.mark.parametrize("before", [0, 130], ids=["at first", "after many small ones"])
def test_entries_of_any_size_are_dead_letters_and_never_fill_the_memory(
    before: int, sqlite_url: str, redis_url: str
) -> None:
    """Ten large entries, announced by the server or not, in a process that cannot hold them together."""
    for number in range(before):
        add(redis_url, envelope(f"small {number}"))
    add(redis_url, b"x" * LARGE, times=LARGE_COUNT)
    add(redis_url, envelope("good"))
    assert work(sqlite_url, redis_url) == "ran 1\n" * (before + 1)

    async def letters() -> list[tuple[str, str]]:
        async with App(sqlite_url) as app:
            return [(one.message.message_type, one.failure.error_type) async for one in app.dead_letters()]

    assert run(letters) == [(REFUSED, "onefold.errors.LimitError")] * LARGE_COUNT
    with redis.Redis.from_url(redis_url) as client:
        assert client.xpending("in", "g")["pending"] == 0


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is set by what /proc tells")
def test_one_entry_of_very_many_values_is_one_dead_letter_and_its_neighbours_are_taken_in(
    sqlite_url: str, redis_url: str
) -> None:
    """Each value is small enough for an envelope, all of them together are more than one pull may take."""
    add(redis_url, envelope("before"))
    add(redis_url, {f"field {number}": b"x" * 100_000 for number in range(400)})
    add(redis_url, envelope("after"))
    assert work(sqlite_url, redis_url) == "ran 1\n" * 2

    async def letters() -> int:
        async with App(sqlite_url) as app:
            return len([one async for one in app.dead_letters()])

    assert run(letters) == 1


def test_the_letter_of_an_entry_that_is_too_large_says_how_large_it_is(sqlite_url: str, redis_url: str) -> None:
    """Its beginning is kept, with the place of the whole entry; a reader of the user's own gets no half entry."""
    add(redis_url, b"x" * (2 * MIB))
    given: list[bytes] = []

    async def scenario() -> None:
        app = App(sqlite_url)
        app.receive(RedisTransport(redis_url, group="g", wait=0.02), "in", read=given.append)  # type: ignore[arg-type]
        async with app:
            await app.work(until_idle=True)
            (letter,) = [one async for one in app.dead_letters()]
            assert f"has {2 * MIB} bytes" in letter.failure.error_message
            assert f"the first {limits.REFUSED_BYTES_MAX} are kept" in letter.failure.error_message

    run(scenario)
    assert given == []


def test_what_a_dead_consumer_had_read_is_taken_over_one_by_one(redis_url: str) -> None:
    """The entries may have killed it, so the first answer has one of them, the next two, and so on."""
    for number in range(20):
        add(redis_url, envelope(str(number)))

    async def scenario() -> None:
        dead, other = (RedisTransport(redis_url, group="g", wait=0.02) for _ in range(2))
        had = await dead.pull("in", limit=100, lease=30.0)
        assert len(had) == 20
        asked: list[int] = []
        call = other._connection.call

        async def counted(function: object, *arguments: list[str]) -> object:
            if getattr(function, "__name__", "") == "claim":
                asked.append(len(arguments[0]))
            return await call(function, *arguments)  # type: ignore[arg-type]

        other._connection.call = counted  # type: ignore[method-assign,assignment]
        again = await other.pull("in", limit=100, lease=0.0)
        assert [one.handle for one in again] == [one.handle for one in had]
        assert asked == [1, 2, 4, 8, 5]

    run(scenario)


def test_a_portion_grows_step_by_step_and_shrinks_at_once() -> None:
    """It starts with one entry and doubles with each answer; an entry as large as a whole pull is requested alone."""
    portion = Portion()
    counts = []
    for _ in range(4):
        counts.append(portion.count)
        portion.learn([100] * portion.count)
        portion.begin()
    assert counts == [1, 2, 4, 8]
    portion.learn([])
    assert portion.count == 16
    portion.learn([100, limits.PULL_BYTES_MAX])
    assert not portion.has_room
    portion.begin()
    assert portion.count == 1
