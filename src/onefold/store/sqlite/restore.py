"""After a restore from backup, or a restart of the machine: leases from before it are worth nothing."""

from __future__ import annotations

from onefold import limits
from onefold.store.sqlite.session import Session
from onefold.store.sqlite.verbs.register import register, registered


def restored(session: Session) -> int:
    """Shut out all leases from before a restore; return how many leases ended."""
    leases: int = session.rows("restored_leases")[0][0]
    session.run("restored_deliveries", limits.FENCE_LEAP)
    session.run("restored_outcomes", limits.FENCE_LEAP)
    return leases


def release_after_boot(session: Session, boot: str) -> None:
    """Leases are dated by the time since the machine started, so they mean nothing after another start."""
    known = registered(session, "boot", "id")
    if known is None or known.value != boot.encode():
        session.run("expire_all")
        register(session, "boot", "id", boot.encode(), version=known.version if known else 0, expires_at=None)
