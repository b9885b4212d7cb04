"""Recurring and debounced tasks."""
