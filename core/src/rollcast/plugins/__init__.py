"""Finding, loading and reporting parts; see ``Registry``.

The names below resolve on first use, so importing this package costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollcast.plugins.expect import Check, any_of, instance_of, is_callable, subclass_of
    from rollcast.plugins.groups import GROUPS, Group
    from rollcast.plugins.hookspecs import hookimpl, hookspec
    from rollcast.plugins.inprocess import generation, install_snapshot, snapshot
    from rollcast.plugins.manager import build_hook_manager
    from rollcast.plugins.metadata import PartInfo, find_groups, find_parts, refresh
    from rollcast.plugins.registry import Registry, find_registries, find_registry
    from rollcast.plugins.reporting import PartReport, report

__all__ = [
    "GROUPS",
    "Check",
    "Group",
    "PartInfo",
    "PartReport",
    "Registry",
    "any_of",
    "build_hook_manager",
    "find_groups",
    "find_parts",
    "find_registries",
    "find_registry",
    "generation",
    "hookimpl",
    "hookspec",
    "install_snapshot",
    "instance_of",
    "is_callable",
    "refresh",
    "report",
    "snapshot",
    "subclass_of",
]

_HOMES = {
    "expect": ("Check", "any_of", "instance_of", "is_callable", "subclass_of"),
    "groups": ("GROUPS", "Group"),
    "hookspecs": ("hookimpl", "hookspec"),
    "inprocess": ("generation", "install_snapshot", "snapshot"),
    "manager": ("build_hook_manager",),
    "metadata": ("PartInfo", "find_groups", "find_parts", "refresh"),
    "registry": ("Registry", "find_registries", "find_registry"),
    "reporting": ("PartReport", "report"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
