"""Which version of onefold this is."""

__version__ = "0.1.0"
