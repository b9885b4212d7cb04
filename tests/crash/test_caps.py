"""A cap while worker processes are killed; ``scripts/caps.py`` runs the same at full size."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "caps.py"


def test_a_cap_holds_while_workers_are_killed(store_url: str) -> None:
    """F2, fault 36: checked with the intervals that handlers wrote down; no place stays lost."""
    store = "sqlite" if store_url.startswith("sqlite") else "postgres"
    size = ["--tasks", "150", "--processes", "4", "--hold", "0.03", "--kill-after", "30", "--busy", "0"]
    done = subprocess.run(
        [sys.executable, SCRIPT, "--store", store, *size], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
