"""The programs of worker processes and of isolated handlers."""
