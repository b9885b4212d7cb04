"""Isolated handlers, each run in a process apart from the worker's."""
