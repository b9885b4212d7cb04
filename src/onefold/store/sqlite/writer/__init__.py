"""The one writer of a SQLite file."""
