"""Where messages rest: SQLite, embedded, and PostgreSQL, for a fleet of machines."""

from __future__ import annotations

import os
from typing import Any, cast
from urllib.parse import parse_qs

from onefold.clock import Clock
from onefold.errors import ConfigurationError
from onefold.store import Store
from onefold.store.shared.sql import load_migrations

#: The options that a SQLite URL may have behind its question mark.
_SQLITE_OPTIONS = ("driver", "journal", "synchronous")


def open_store(url: str, *, clock: Clock | None = None, driver: str | None = None, journal: str | None = None) -> Store:
    """Return the store a URL names, not yet open: ``sqlite:///shop.db`` or ``postgresql://host/database``.

    ``driver`` and ``journal`` are for SQLite, and may stand in the URL instead.
    """
    scheme, _, _ = url.partition("://")
    given = {"driver": driver, "journal": journal}
    if scheme == "sqlite":
        return _open_sqlite(url, clock, {name: value for name, value in given.items() if value is not None})
    if scheme in ("postgresql", "postgres"):
        if wrong := [name for name, value in given.items() if value is not None]:
            raise ConfigurationError(f"{wrong[0]}= is for SQLite; a PostgreSQL store has no such option")
        try:
            from onefold.store.postgres import PostgresStore
        except ImportError as error:
            if (error.name or "").startswith("onefold"):
                raise  # a broken installation, which no driver mends
            raise ConfigurationError("PostgreSQL needs its driver: pip install 'onefold[postgres]'") from error
        return PostgresStore(url, clock=clock)
    # Not a word of it: the password of a URL that is mistyped may be anywhere in it.
    raise ConfigurationError(
        "the store's URL, which is not repeated here because it may hold a password, is not a store; "
        "write sqlite:///… or postgresql://user:password@host/database, without +driver"
    )


def _open_sqlite(url: str, clock: Clock | None, given: dict[str, str]) -> Store:
    from onefold.store.sqlite import SQLiteStore

    path, options = _read_sqlite(url)
    for name, value in given.items():
        if options.setdefault(name, value) != value:
            raise ConfigurationError(f"the URL says {name}={options[name]}, the app says {name}={value!r}; say it once")
    return SQLiteStore(
        path,
        clock=clock,
        synchronous=options.get("synchronous", "FULL").upper(),
        driver=cast("Any", options.get("driver", "apsw")),
        journal=cast("Any", options.get("journal")),
    )


def _read_sqlite(url: str) -> tuple[str, dict[str, str]]:
    """Return the path and the options of a SQLite URL."""
    path, _, query = url.removeprefix("sqlite://").partition("?")
    if not path.startswith("/") or len(path) < 2:
        raise ConfigurationError(
            "the SQLite URL names no file; write sqlite:///shop.db, or sqlite:////var/lib/shop.db, with three or "
            "four slashes"
        )
    options = {name: values[-1] for name, values in parse_qs(query, keep_blank_values=True).items()}
    unknown = options.keys() - {*_SQLITE_OPTIONS}
    if unknown:
        raise ConfigurationError(f"sqlite: unknown option {min(unknown)!r}; known: {', '.join(_SQLITE_OPTIONS)}")
    return path[1:], options


def refuse_missing(url: str) -> None:
    """Raise for a SQLite file that does not exist: a command that only looks at a store must not create it."""
    if not url.startswith("sqlite://"):
        return
    path, _ = _read_sqlite(url)
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        if path != ":memory:":
            wrong = f"{path} does not exist; check the name, or create it with `onefold migrate`"
            raise ConfigurationError(wrong) from None
    except OSError:
        pass  # it is there, perhaps; opening it says what is wrong


def schema_text(url: str) -> str:
    """Return the SQL of a store's migrations, for people who apply it themselves."""
    engine = "sqlite" if url.startswith("sqlite:") else "postgres"
    migrations = load_migrations(f"onefold.store.{engine}")
    return "\n".join(f"-- {migration.name}\n{migration.text}" for migration in migrations)
