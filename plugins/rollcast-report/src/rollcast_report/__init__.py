"""The trackers ``console``, ``jsonl`` and ``report``, and the commands ``runs`` and ``watch``.

Names resolve when they are first used; importing this package imports none of the trackers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollcast import lazy_exports

if TYPE_CHECKING:
    from rollcast_report.console import ConsoleTracker as ConsoleTracker
    from rollcast_report.jsonl import JsonlTracker as JsonlTracker
    from rollcast_report.report import ReportTracker as ReportTracker
    from rollcast_report.report import write_report as write_report

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "console": ["ConsoleTracker"],
        "jsonl": ["JsonlTracker"],
        "report": ["ReportTracker", "write_report"],
    },
)
