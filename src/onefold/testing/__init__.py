"""Tools for tests of programs built on onefold: a fake clock, draining queues, calling a handler, failing stores.

``onefold.testing.contracts`` is the suite that every store must pass; it needs pytest and is not imported here.
"""

from onefold.testing.clock import FakeClock
from onefold.testing.context import context
from onefold.testing.drain import assert_idle, drain
from onefold.testing.faults import Fault, FaultyStore, HastyClock
from onefold.testing.transport import MemoryTransport
from onefold.testing.undoing import try_undos

__all__ = [
    "FakeClock",
    "Fault",
    "FaultyStore",
    "HastyClock",
    "MemoryTransport",
    "assert_idle",
    "context",
    "drain",
    "try_undos",
]
