"""The trackers that ship with the core: ``console``, ``jsonl`` and ``report``.

Names resolve when they are first used; importing this package imports none of the trackers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollcast.trackers.console import ConsoleTracker
    from rollcast.trackers.jsonl import JsonlTracker
    from rollcast.trackers.report import ReportTracker, write_report

_EXPORTS = {
    "ConsoleTracker": "rollcast.trackers.console",
    "JsonlTracker": "rollcast.trackers.jsonl",
    "ReportTracker": "rollcast.trackers.report",
    "write_report": "rollcast.trackers.report",
}

__all__ = ["ConsoleTracker", "JsonlTracker", "ReportTracker", "write_report"]


def __getattr__(name: str) -> Any:
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it exports {', '.join(__all__)}")
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted(__all__)
