"""The version of onefold."""

__version__ = "0.1.0"
