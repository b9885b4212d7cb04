"""The store on SQLite."""

from onefold.store.sqlite.store import SQLiteStore

__all__ = ["SQLiteStore"]
