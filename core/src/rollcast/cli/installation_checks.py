"""Health checks of the installation: Python, distributions and plugins."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import sys
from collections.abc import Iterator

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet

from rollcast.contracts.health import BaseHealthCheck, Finding, HealthSetup, ok, problem
from rollcast.plugins.discovery import (
    CORE_DISTRIBUTION,
    describe_groups,
    find_core_version,
    find_groups,
    find_known,
    find_plugins,
)

__all__ = ["PluginsCheck", "PythonCheck", "VersionsCheck"]


class PythonCheck(BaseHealthCheck):
    """The interpreter, against the versions that the core supports."""

    subject = "Python"

    def run(self, setup: HealthSetup) -> Iterator[Finding]:
        """Compare the running version with the core's ``Requires-Python``."""
        version = platform.python_version()
        try:
            about = importlib.metadata.metadata(CORE_DISTRIBUTION)
        except importlib.metadata.PackageNotFoundError:  # from a bare source tree
            yield ok("version", f"{version} ({sys.executable})")
            return
        needed = next(iter(about.get_all("Requires-Python") or ()), "")
        if SpecifierSet(needed).contains(version, prereleases=True):
            yield ok("version", f"{version} ({sys.executable})")
        else:
            yield problem(
                "version",
                f"{version} ({sys.executable}), and rollcast needs {needed}",
                "make an environment with a supported Python and install rollcast there: python3.11 -m venv DIR",
            )


class VersionsCheck(BaseHealthCheck):
    """The distributions of rollcast share one version, and what they require is installed in a version that fits."""

    subject = "distributions"

    def run(self, setup: HealthSetup) -> Iterator[Finding]:
        """Read installed metadata."""
        core = find_core_version()
        # Published with the core, by its index of plugins; strangers' distributions have versions of their own.
        ours = {name for group in describe_groups() for name in find_known(group).values()}
        installed = {name: version for name in sorted(ours) if (version := _version(name)) is not None}
        faults = [
            problem(
                name,
                f"version {version} beside {CORE_DISTRIBUTION} {core}; they are released together, under one version",
                f"pip install '{name}=={core}'",
            )
            for name, version in installed.items()
            if core is not None and version != core
        ]
        others = {plugin.distribution for group in find_groups() for plugin in find_plugins(group)}
        checked = sorted({CORE_DISTRIBUTION, *installed, *(other for other in others if other)})
        faults += [fault for name in checked for fault in _unmet(name)]
        yield from faults
        if not faults:
            yield ok("versions", f"{len(installed)} distributions of version {core}; every requirement is met")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _unmet(distribution: str) -> Iterator[Finding]:
    """Yield a finding for each requirement of a distribution that what is installed does not meet."""
    try:
        lines = importlib.metadata.requires(distribution) or ()
    except importlib.metadata.PackageNotFoundError:
        return
    for line in lines:
        try:
            needs = Requirement(line)
        except InvalidRequirement:
            continue  # the registry has logged it
        if needs.marker is not None and not needs.marker.evaluate({"extra": ""}):
            continue
        version = _version(needs.name)
        if version is None or not needs.specifier.contains(version, prereleases=True):
            asked = f"{needs.name}{needs.specifier}"
            there = "is not installed" if version is None else f"is installed in version {version}"
            yield problem(distribution, f"requires {asked}, and {needs.name} {there}", f"pip install '{asked}'")


class PluginsCheck(BaseHealthCheck):
    """Every plugin can be imported, and is what its group expects; as ``rollcast plugins --check``."""

    subject = "plugins"
    timeout_s = 900.0

    def run(self, setup: HealthSetup) -> Iterator[Finding]:
        """Import each plugin in a process of its own."""
        from rollcast.cli.plugins import check_all

        rows = check_all()
        broken = [row for row in rows if row.state not in ("ok", "in-process")]
        owners = {row.distribution for row in rows}
        yield ok("loaded", f"{len(rows) - len(broken)} plugins of {len(owners)} distributions")
        for row in broken:
            short = row.group.removeprefix("rollcast.")
            hint = re.search(r"(?:Try: |reinstall it|Ask for ).*", row.cause)
            fix = hint[0].removeprefix("Try: ") if hint else f"reinstall {row.distribution}, or pip uninstall it"
            cause = " ".join(row.cause.split())
            yield problem(
                f"{short}/{row.name}", f"{row.distribution} {row.version} ({row.value}) is {row.state}: {cause}", fix
            )
