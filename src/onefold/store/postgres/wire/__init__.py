"""Connections to PostgreSQL and the statements on them."""
