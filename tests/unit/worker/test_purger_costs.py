"""The processor time of purging, which a busy machine changes little."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_SCRIPT = Path(__file__).parents[3] / "scripts" / "purge.py"


@pytest.mark.deep
@pytest.mark.parametrize("store", ["sqlite", "postgres"])
def test_purging_costs_a_quarter_of_put_claim_and_settle_and_keeps_up(store: str) -> None:
    """At most a quarter of what the messages cost before, at 2,000 messages a second or more; the best of rounds."""
    command = [sys.executable, str(_SCRIPT), "--store", store, "--standing", "50000", "--rounds", "3"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
