"""Crash tests count what they tried; the totals are printed at the end, whichever process ran them."""

from __future__ import annotations

from collections import Counter

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    points: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name.startswith("crash points on ") and getattr(report, "when", "") == "call":
                    points[name] += value
    for name, number in sorted(points.items()):
        terminalreporter.write_line(f"{name}: {number}")
