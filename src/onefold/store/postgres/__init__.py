"""The store on PostgreSQL, for a fleet of machines."""

from onefold.store.postgres.store import PostgresStore

__all__ = ["PostgresStore"]
