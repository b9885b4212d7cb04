"""The store's verbs on PostgreSQL, one module each."""
