"""Fixtures of the fault tests."""

from __future__ import annotations

import pytest
from fault_scene import Loop


@pytest.fixture(params=["asyncio", "uvloop"])
def loop(request: pytest.FixtureRequest) -> Loop:
    """Each event loop in turn: they report a connection that ends in different ways."""
    kind: Loop = request.param
    return kind
