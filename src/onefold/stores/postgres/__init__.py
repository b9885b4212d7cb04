"""The store on PostgreSQL, for a fleet of machines."""

from onefold.stores.postgres.store import PostgresStore

__all__ = ["PostgresStore"]
