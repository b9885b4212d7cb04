"""Lets pytest rewrite the assertions of the shipped contract, so that failures are explained as in our own tests."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("onefold.testing.contracts")
