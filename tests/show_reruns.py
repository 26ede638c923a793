"""Show how a test failed that passed at its second attempt; used with ``--reruns`` of pytest-rerunfailures."""

from __future__ import annotations

import pytest
from _pytest.terminal import TerminalReporter


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    first_attempts: list[pytest.TestReport] = terminalreporter.stats.get("rerun", [])
    failed = {report.nodeid for kind in ("failed", "error") for report in terminalreporter.stats.get(kind, [])}
    unstable = [report for report in first_attempts if report.nodeid not in failed]
    if not unstable:
        return
    terminalreporter.section("passed only at the second attempt", yellow=True)
    for report in unstable:
        terminalreporter.write_line(f"{report.nodeid} ({report.when})", yellow=True)
        terminalreporter.write_line(report.longreprtext)
    terminalreporter.line("")
