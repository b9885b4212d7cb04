"""The test server itself, started for real, because all tests on PostgreSQL depend on it."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from onefold.testing import servers
from onefold.testing.servers import PostgresServer, children_of, find_postgres


def test_a_fresh_database_answers_a_query(postgres_url: str) -> None:
    with psycopg.connect(postgres_url) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)
        assert connection.execute("SHOW fsync").fetchone() == ("on",)


def test_other_users_of_the_machine_are_kept_out(postgres_server: PostgresServer) -> None:
    """Neither over the port nor over the socket, as no role; and the password is not among a program's arguments."""
    directory = postgres_server._path()
    assert directory.stat().st_mode & 0o077 == 0
    for where in ("127.0.0.1", str(directory)):
        for password in (None, "", "postgres"):
            with pytest.raises(psycopg.OperationalError, match=r"password"):
                psycopg.connect(host=where, port=postgres_server.port, user="postgres", password=password)
    password = conninfo_to_dict(postgres_server.url())["password"]
    assert isinstance(password, str)
    assert len(password) == 32
    processes = [postgres_server.pid, *children_of(postgres_server.pid)]
    arguments = b" ".join(Path(f"/proc/{one}/cmdline").read_bytes() for one in processes)
    assert password.encode() not in arguments
    assert not [file for file in directory.iterdir() if file.is_file() and password in file.read_text()]


def test_a_committed_row_survives_kill_and_restart(postgres_server: PostgresServer, postgres_url: str) -> None:
    with psycopg.connect(postgres_url) as connection:
        connection.execute("CREATE TABLE kept (id int)")
        connection.execute("INSERT INTO kept VALUES (7)")
        connection.commit()
        connection.execute("INSERT INTO kept VALUES (8)")
        postgres_server.kill()
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(postgres_url)

    postgres_server.restart()

    with psycopg.connect(postgres_url) as connection:
        assert connection.execute("SELECT id FROM kept").fetchall() == [(7,)]


def test_kill_leaves_no_backend_behind(postgres_server: PostgresServer, postgres_url: str) -> None:
    with psycopg.connect(postgres_url) as connection:
        backend = connection.info.backend_pid
        postgres_server.kill()
        # The server's death alone would also end an idle backend, but only some time later.
        assert _is_gone_soon(backend)
    postgres_server.restart()


def test_restart_keeps_the_port(postgres_server: PostgresServer) -> None:
    before = postgres_server.url()
    postgres_server.restart()
    assert postgres_server.url() == before


def test_a_copied_database_has_the_template_rows(postgres_server: PostgresServer) -> None:
    template = postgres_server.create_database("template_with_rows")
    with psycopg.connect(template) as connection:
        connection.execute("CREATE TABLE seeded AS SELECT 5 AS id")
    try:
        copy = postgres_server.create_database("copied", template="template_with_rows")
        with psycopg.connect(copy) as connection:
            assert connection.execute("SELECT id FROM seeded").fetchall() == [(5,)]
    finally:
        postgres_server.drop_database("copied")
        postgres_server.drop_database("template_with_rows")


def test_dropping_a_database_ends_its_connections(postgres_server: PostgresServer) -> None:
    url = postgres_server.create_database("dropped")
    with psycopg.connect(url) as connection:
        postgres_server.drop_database("dropped")
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")
    postgres_server.drop_database("dropped")


def test_stop_leaves_neither_process_nor_directory(postgres_server: PostgresServer) -> None:
    with PostgresServer(postgres_server.binaries) as server:
        process, directory = server._process, server._directory
        assert process is not None
        assert directory is not None
        assert directory.is_dir()
    assert process.poll() == 0
    assert not directory.exists()


def test_a_start_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("postgres", "initdb"):
        (tmp_path / name).write_text("#!/bin/sh\n[ $1 = --version ] && echo '(none) 18.4'\n")
        (tmp_path / name).chmod(0o755)
    made = tmp_path / "made"
    made.mkdir()
    monkeypatch.setattr(servers, "SHORT_DIRECTORY", str(made))
    monkeypatch.setattr("tempfile.tempdir", str(made))
    with pytest.raises(RuntimeError, match="initdb failed"):
        PostgresServer(tmp_path).start()
    assert list(made.iterdir()) == []


def test_the_environment_names_the_binaries_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEFOLD_POSTGRES_BIN", str(tmp_path))
    with pytest.raises(RuntimeError, match="ONEFOLD_POSTGRES_BIN"):
        find_postgres()
    for name in ("postgres", "initdb"):
        (tmp_path / name).touch(mode=0o755)
    assert find_postgres() == tmp_path


def _is_gone_soon(pid: int) -> bool:
    """Whether a process that was sent SIGKILL is gone or a zombie."""
    for _ in range(servers.POLLS_MAX):
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        threading.Event().wait(servers.POLL_SECONDS)
    return False
