"""Transactions of callers and handlers, and the messages that are put with their commits."""
