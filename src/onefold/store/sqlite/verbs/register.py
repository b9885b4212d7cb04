"""The register: small named values with a version each, compared and set."""

from __future__ import annotations

from onefold.store import Registered
from onefold.store.sqlite.session import Session


def register(
    session: Session, kind: str, name: str, value: bytes | None, *, version: int, expires_at: int | None
) -> bool:
    """Compare and set one entry; None removes it."""
    now = session.clock.now()
    if value is None:
        return bool(session.rows("register_delete", kind, name, version))
    if version == 0:
        return bool(session.rows("register_insert", kind, name, value, expires_at, now))
    return bool(session.rows("register_update", kind, name, value, expires_at, now, version))


def registered(session: Session, kind: str, name: str) -> Registered | None:
    """Return one entry unless it has expired."""
    for value, version in session.rows("registered", kind, name, session.clock.now()):
        return Registered(value, version)
    return None


def entries(session: Session, kind: str) -> dict[str, Registered]:
    """Return every entry of one kind that has not expired."""
    found = session.rows("entries", kind, session.clock.now())
    return {name: Registered(value, version) for name, value, version in found}
