"""Let pytest explain failed assertions of the contract as it does for those written here."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("onefold.testing.contracts")
