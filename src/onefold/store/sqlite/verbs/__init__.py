"""The store's verbs on SQLite, one module each."""
