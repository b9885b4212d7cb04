"""The write-ahead log of the SQLite store: however long it grew, it is short again soon afterwards."""

from __future__ import annotations

import asyncio
from pathlib import Path

import apsw
import pytest

from onefold import App
from onefold.clock import SystemClock
from onefold.store.sqlite.connection import LOG_BYTES_MAX
from onefold.store.sqlite.writer import writer

_BODY = "x" * 90_000
_LOOKS_MAX = 500


@pytest.fixture(autouse=True)
def _in_haste(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "_SHORTEN_LOG_SECONDS", 0.02)


def _app(path: Path) -> App:
    app = App(f"sqlite:///{path}?synchronous=OFF")

    @app.task
    async def work(body: str) -> None: ...

    return app


async def _send(app: App, number: int, together: int) -> None:
    for _ in range(0, number, together):
        await app.send_many(app.tasks["work"].call(_BODY) for _ in range(together))


def _is_long(path: Path) -> bool:
    return Path(f"{path}-wal").stat().st_size > LOG_BYTES_MAX


async def _becomes_short(path: Path) -> bool:
    """Whether the log becomes short while nothing more is written."""
    for _ in range(_LOOKS_MAX):
        if not _is_long(path):
            return True
        await SystemClock().sleep(0.01)
    return False


def test_the_log_is_short_again_after_a_large_transaction(tmp_path: Path) -> None:
    """One commit of 27 MB lies in the log; when it is copied nothing of it stays there."""
    path = tmp_path / "shop.db"

    async def main() -> None:
        async with _app(path) as app:
            await _send(app, 300, together=300)
            assert await _becomes_short(path)
            await _send(app, 1, together=1)
            assert sum(counts.scheduled for counts in (await app.count()).values()) == 301

    asyncio.run(main())


def test_the_log_is_short_again_after_a_long_read(tmp_path: Path) -> None:
    """While another connection reads, the log cannot begin anew and grows; it is made empty when the read is over."""
    path = tmp_path / "shop.db"

    async def main() -> None:
        async with _app(path) as app:
            await _send(app, 1, together=1)
            reading = apsw.Connection(str(path))
            try:
                reading.execute("BEGIN; SELECT count(*) FROM onefold_message")
                await _send(app, 300, together=10)
                assert _is_long(path)
                assert reading.execute("SELECT count(*) FROM onefold_message").fetchall() == [(1,)]
                reading.execute("COMMIT")
                assert await _becomes_short(path)
            finally:
                reading.close()

    asyncio.run(main())


def test_a_store_closes_while_its_log_is_to_be_made_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A close neither waits for that nor is disturbed by it."""
    monkeypatch.setattr(writer, "_SHORTEN_LOG_SECONDS", 0.0)
    path = tmp_path / "shop.db"

    async def main() -> None:
        for number in (1, 2):
            async with asyncio.timeout(30), _app(path) as app:
                await _send(app, 300, together=300)
                assert sum(counts.scheduled for counts in (await app.count()).values()) == number * 300

    asyncio.run(main())
