"""Where messages rest: SQLite, embedded, and PostgreSQL, for a fleet of machines."""

from __future__ import annotations

import re
from urllib.parse import parse_qs

from onefold.clock import Clock
from onefold.errors import ConfigurationError
from onefold.store import Store
from onefold.stores.sql import load_migrations


def open_store(url: str, *, clock: Clock | None = None) -> Store:
    """Return the store a URL names, not yet open: ``sqlite:///shop.db`` or ``postgresql://host/database``."""
    scheme, _, rest = url.partition("://")
    if scheme == "sqlite":
        from onefold.stores.sqlite import SQLiteStore

        path, _, query = rest.partition("?")
        if not path.startswith("/") or len(path) < 2:
            raise ConfigurationError(f"{url!r} names no file; write sqlite:///shop.db, or sqlite:////var/lib/shop.db")
        options = {name: values[-1] for name, values in parse_qs(query).items()}
        unknown = options.keys() - {"synchronous"}
        if unknown:
            raise ConfigurationError(f"sqlite: unknown option {min(unknown)!r}; known: synchronous")
        return SQLiteStore(path[1:], clock=clock, synchronous=options.get("synchronous", "FULL").upper())
    if scheme in ("postgresql", "postgres"):
        try:
            from onefold.stores.postgres import PostgresStore
        except ImportError as error:
            raise ConfigurationError("PostgreSQL needs its driver: pip install 'onefold[postgres]'") from error
        return PostgresStore(url, clock=clock)
    raise ConfigurationError(f"{masked(url)!r} is not a store; use sqlite:///… or postgresql://…")


def schema_text(url: str) -> str:
    """Return the SQL of a store's migrations, for people who apply it themselves."""
    engine = "sqlite" if url.startswith("sqlite:") else "postgres"
    migrations = load_migrations(f"onefold.stores.{engine}")
    return "\n".join(f"-- {migration.name}\n{migration.text}" for migration in migrations)


_PASSWORD = re.compile(r"(://[^:/@\s]*:)[^@\s]*(@)|((?:password|passwd|sslpassword)=)[^&\s]*", re.IGNORECASE)


def masked(url: str) -> str:
    """Return the URL without its password, fit for logs and errors."""
    return _PASSWORD.sub(lambda found: f"{found[1] or found[3]}***{found[2] or ''}", url)
