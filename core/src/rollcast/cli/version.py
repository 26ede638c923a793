"""``rollcast version``: what is installed, from metadata alone."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as find_version

from rollcast.cli.options import Traceback
from rollcast.cli.output import print_lines

__all__ = ["version"]


def version(_traceback: Traceback = False) -> None:
    """Show the versions of the core, the installed plugins, and what they run on."""
    from rollcast.plugins.discovery import CORE_DISTRIBUTION, find_groups, find_plugins

    groups = [group for group in find_groups() if group.startswith("rollcast.")]
    found = {part.distribution: part.version for group in groups for part in find_plugins(group)}
    core = found.pop(CORE_DISTRIBUTION, None) or _installed(CORE_DISTRIBUTION)
    rows = {CORE_DISTRIBUTION: core, **dict(sorted(found.items())), "python": platform.python_version()}
    rows |= {name: _installed(name) for name in ("torch", "ray")}
    width = max(map(len, rows))
    print_lines(*(f"{name:<{width}}  {number}" for name, number in rows.items()))


def _installed(distribution: str) -> str:
    try:
        return find_version(distribution)
    except PackageNotFoundError:
        return "not installed"
