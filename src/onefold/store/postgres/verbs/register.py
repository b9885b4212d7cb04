"""The register: small named values with a version each, compared and set."""

from __future__ import annotations

from typing import Any

from onefold.store import Registered
from onefold.store.postgres.session import Session


async def register(
    session: Session, kind: str, name: str, value: bytes | None, *, version: int, expires_at: int | None
) -> bool:
    statement = "register_delete" if value is None else "register_update" if version else "register_insert"
    parameters: dict[str, Any] = {
        "now": session.now,
        "kind": kind,
        "name": name,
        "value": value,
        "version": version,
        "expires_at": expires_at,
    }
    return bool(await session.wire.rows(statement, parameters))


async def registered(session: Session, kind: str, name: str) -> Registered | None:
    for value, version in await session.wire.rows("registered", {"now": session.now, "kind": kind, "name": name}):
        return Registered(value, version)
    return None


async def entries(session: Session, kind: str) -> dict[str, Registered]:
    rows = await session.wire.rows("entries", {"now": session.now, "kind": kind})
    return {name: Registered(value, version) for name, value, version in rows}
