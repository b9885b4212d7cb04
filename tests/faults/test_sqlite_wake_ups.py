"""Wake-ups between processes on one SQLite file: whatever goes wrong with them, sends and settlements succeed."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from onefold import App
from onefold.store.sqlite import notify
from onefold.store.sqlite.notify import Notifier

#: Far longer than a wake-up takes, far shorter than a hanging test.
SECONDS_MAX = 10
#: A user and a group that no process here runs as.
STRANGER, GROUP = 4002, 4003

needs_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can be other users")


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that other users can enter, unlike those that pytest makes."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


async def send_and_work(path: Path, number: int = 5) -> None:
    """Send a few messages, each of which sends another from its handler, and handle all of them."""
    app = App(f"sqlite:///{path}")
    ran: list[int] = []

    @app.task
    async def second(n: int) -> None:
        ran.append(n)

    @app.task
    async def first(n: int) -> None:
        await second.send(n)

    async with asyncio.timeout(SECONDS_MAX), app:
        for n in range(number):
            await first.send(n)
            await asyncio.sleep(notify._TICK_MICROS / 1_000_000)  # so that each commit looks for listeners
        await app.work(until_idle=True)
    assert sorted(ran) == list(range(number))


def planted_link_is_not_followed(home: Path) -> None:
    """Another user has planted a link to a directory of files in place of the wake-up directory."""
    precious = home / "precious"
    precious.mkdir()
    for name in ("invoices.csv", "notes.txt"):
        (precious / name).write_text("kept")
    (home / "shop.db-wake").symlink_to(precious)
    asyncio.run(send_and_work(home / "shop.db"))
    assert sorted(path.name for path in precious.iterdir()) == ["invoices.csv", "notes.txt"]


def test_a_planted_link_is_not_followed_and_no_file_is_removed(tmp_path: Path) -> None:
    """The files behind a planted link are still there after every commit has looked for listeners."""
    planted_link_is_not_followed(tmp_path)


def test_nothing_but_sockets_is_removed_from_the_directory(tmp_path: Path) -> None:
    """A file and a link in a directory with the right owner stay; the socket of a dead process is removed."""
    directory = tmp_path / "shop.db-wake"
    directory.mkdir(mode=0o700)
    (directory / "file").write_text("kept")
    (directory / "link").symlink_to("file")
    dead = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    dead.bind(str(directory / "dead"))
    dead.close()
    asyncio.run(send_and_work(tmp_path / "shop.db"))
    assert sorted(path.name for path in directory.iterdir()) == ["file", "link"]


def listing_is_bounded(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a commit looks at no more than the limit of thousands of entries in the directory."""
    directory = home / "shop.db-wake"
    directory.mkdir(mode=0o700)
    for number in range(4 * notify.LISTENERS_MAX):
        (directory / f"{number}").symlink_to("nowhere")
    seen: list[int] = []
    scandir = os.scandir

    class Counted(AbstractContextManager[Iterator[Any]]):
        def __init__(self, of: Any) -> None:
            self.entries = scandir(of)

        def __enter__(self) -> Iterator[Any]:
            numbers = count(1)
            seen.append(0)
            for entry in self.entries:
                seen[-1] = next(numbers)
                yield entry

        def __exit__(self, *_: object) -> None:
            self.entries.close()

    monkeypatch.setattr(os, "scandir", Counted)
    asyncio.run(send_and_work(home / "shop.db", 2))
    assert seen
    assert max(seen) <= notify.LISTENERS_MAX


def test_a_flooded_directory_is_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many entries another process has put there, the event loop reads a bounded number of them."""
    listing_is_bounded(tmp_path, monkeypatch)


@pytest.mark.parametrize("function", ["lstat", "open", "scandir", "stat"])
def test_a_wake_up_that_fails_fails_no_send(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    """Listeners come and go, descriptors run out: whichever call fails, at whatever moment, sends succeed."""
    directory = f"{tmp_path / 'shop.db'}-wake"
    Path(directory).mkdir(mode=0o700)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    listening.bind(f"{directory}/alive")
    real: Callable[..., Any] = getattr(os, function)
    errors = [FileNotFoundError(2, "gone"), PermissionError(13, "no"), OSError(24, "too many open files")]
    failed = count()

    def fail(path: Any, *args: Any, **options: Any) -> Any:
        if function == "scandir" or path == directory or options.get("dir_fd") is not None:
            raise errors[next(failed) % len(errors)]
        return real(path, *args, **options)

    monkeypatch.setattr(os, function, fail)
    with listening:
        asyncio.run(send_and_work(tmp_path / "shop.db"))
    assert next(failed)


def test_listeners_that_come_and_go_fail_no_ring(tmp_path: Path) -> None:
    """The directory is made and removed again and again beside a process that rings; both continue."""
    path = tmp_path / "shop.db"
    path.touch()

    async def scenario() -> None:
        ringing = Notifier(str(path), between_processes=True)
        for _ in range(50):
            listening = Notifier(str(path), between_processes=True)
            waiting = asyncio.create_task(listening.wait(SECONDS_MAX))
            await asyncio.sleep(0)
            ringing._listeners.notify()
            await asyncio.wait_for(waiting, SECONDS_MAX)
            listening.close()
            assert ringing._listeners.notify() is False
        ringing.close()

    asyncio.run(scenario())
    assert not Path(f"{path}-wake").exists()


def test_a_path_longer_than_a_socket_address_is_woken_too(tmp_path: Path) -> None:
    """A Unix address has room for a hundred bytes, while the path of a database may be longer."""
    home = tmp_path / ("a" * 100) / ("b" * 100)
    home.mkdir(parents=True)
    path = home / "shop.db"
    path.touch()

    async def scenario() -> None:
        ringing, listening = (Notifier(str(path), between_processes=True) for _ in range(2))
        waiting = asyncio.create_task(listening.wait(SECONDS_MAX))
        await asyncio.sleep(0)
        ringing.ring()
        await asyncio.wait_for(waiting, SECONDS_MAX / 2)
        ringing.close()
        listening.close()

    if not os.path.isdir(notify._DESCRIPTORS):
        pytest.skip("this system has no paths through descriptors; it polls")
    asyncio.run(scenario())


def test_what_a_killed_process_left_is_gone_after_the_last_close(tmp_path: Path) -> None:
    """A socket without a process is removed, and the directory with it."""
    path = tmp_path / "shop.db"
    path.touch()
    code = (
        "import asyncio, os, sys\nfrom onefold.store.sqlite.notify import Notifier\n"
        "async def main():\n    await Notifier(sys.argv[1], between_processes=True).wait(0.01)\n    os._exit(9)\n"
        "asyncio.run(main())"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], timeout=SECONDS_MAX, check=False).returncode == 9
    directory = Path(f"{path}-wake")
    assert len(list(directory.iterdir())) == 1

    async def scenario() -> None:
        wake = Notifier(str(path), between_processes=True)
        await wake.wait(0.01)
        wake.close()

    asyncio.run(scenario())
    assert not directory.exists()


def run_as_stranger(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Run code as another user: imports run with the rights to read the interpreter, which are then dropped."""
    prelude = (
        "import asyncio, os, sys\nfrom onefold import App\nfrom onefold.store.sqlite.notify import Notifier\n"
        f"os.setgroups([]); os.setgid({GROUP}); os.setuid({STRANGER})\n"
    )
    return subprocess.run(
        [sys.executable, "-c", prelude + code, *args], timeout=30, capture_output=True, text=True, check=False
    )


@needs_root
def test_the_directory_of_another_user_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A directory in the right place is not used if a stranger owns it or may write to it."""
    for number, (owner, mode) in enumerate([(STRANGER, 0o777), (STRANGER, 0o700), (0, 0o777)]):
        home = tmp_path / str(number)
        home.mkdir()
        directory = home / "shop.db-wake"
        directory.mkdir()
        os.chown(directory, owner, owner)
        directory.chmod(mode)
        planted = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        planted.bind(str(directory / "planted"))
        planted.setblocking(False)
        caplog.clear()
        asyncio.run(send_and_work(home / "shop.db"))
        with planted, pytest.raises(BlockingIOError):
            planted.recv(1)
        assert [path.name for path in directory.iterdir()] == ["planted"]
        assert caplog.text.count("wake_ups_off") == 1


@needs_root
def test_users_that_share_a_file_by_its_group_wake_each_other(public: Path) -> None:
    """The directory and its sockets belong to the file's group, whichever user made them."""
    home = public / "shared"
    home.mkdir()
    os.chown(home, 0, GROUP)
    home.chmod(0o770)
    path = home / "shop.db"
    path.touch()
    os.chown(path, 0, GROUP)
    path.chmod(0o660)
    listen = "w = Notifier(sys.argv[1], between_processes=True)\nprint('ready', flush=True)\n"
    ring = (
        "async def main():\n    w = Notifier(sys.argv[1], between_processes=True)\n"
        "    print(w._listeners.notify())\nasyncio.run(main())"
    )

    async def stranger_rings() -> None:
        wake = Notifier(str(path), between_processes=True)
        waiting = asyncio.create_task(wake.wait(SECONDS_MAX))
        await asyncio.sleep(0)
        ran = await asyncio.to_thread(run_as_stranger, ring, str(path))
        assert ran.stdout == "True\n", ran.stderr
        await asyncio.wait_for(waiting, SECONDS_MAX / 2)
        wake.close()

    async def stranger_listens() -> None:
        code = listen + f"asyncio.run(w.wait({SECONDS_MAX}))\nprint('woken')"
        running = asyncio.create_task(asyncio.to_thread(run_as_stranger, code, str(path)))
        wake = Notifier(str(path), between_processes=True)
        while not wake._listeners.notify():
            assert not running.done(), running.result()
            await asyncio.sleep(0.01)
        ran = await running
        assert "woken" in ran.stdout, ran.stderr
        wake.close()

    asyncio.run(stranger_rings())
    asyncio.run(stranger_listens())


@needs_root
def test_a_send_succeeds_beside_listeners_that_may_not_be_seen(public: Path) -> None:
    """Another user's worker has made the directory for itself alone; sends and settlements still succeed."""
    home = public / "open"
    home.mkdir()
    os.chown(home, STRANGER, GROUP)
    directory = home / "shop.db-wake"
    directory.mkdir(mode=0o700)
    code = (
        "async def main():\n    app = App('sqlite:///' + sys.argv[1])\n    ran = []\n"
        "    @app.task(name='t')\n    async def t(n: int) -> None: ran.append(n)\n"
        "    async with app:\n        for n in range(3): await t.send(n)\n"
        "        await app.work(until_idle=True)\n    print(ran)\nasyncio.run(main())"
    )
    ran = run_as_stranger(code, str(home / "shop.db"))
    assert ran.stdout == "[0, 1, 2]\n", ran.stderr
