"""The supervisor: the parent of worker processes."""
