"""The trackers ``console``, ``jsonl`` and ``report``.

Names resolve when they are first used; importing this package imports none of the trackers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollcast_report.console import ConsoleTracker
    from rollcast_report.jsonl import JsonlTracker
    from rollcast_report.report import ReportTracker, write_report

_EXPORTS = {
    "ConsoleTracker": "rollcast_report.console",
    "JsonlTracker": "rollcast_report.jsonl",
    "ReportTracker": "rollcast_report.report",
    "write_report": "rollcast_report.report",
}

__all__ = ["ConsoleTracker", "JsonlTracker", "ReportTracker", "write_report"]


def __getattr__(name: str) -> Any:
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it exports {', '.join(__all__)}")
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted(__all__)
