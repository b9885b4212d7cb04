"""Handlers: the contexts they are given, and how they are called."""
