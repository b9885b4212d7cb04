"""The store on SQLite."""

from onefold.stores.sqlite.store import SQLiteStore

__all__ = ["SQLiteStore"]
