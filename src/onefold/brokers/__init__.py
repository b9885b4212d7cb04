"""Brokers at the edges: Redis streams."""
