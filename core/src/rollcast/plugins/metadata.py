"""What the installed distributions announce, read from their metadata without importing them.

This is the only place that reads entry points. The read is fresh per process and cached per
``sys.path``; nothing is kept on disk, so an edited or reinstalled plugin is never seen stale.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import logging
import re
import sys
from dataclasses import dataclass

from rollcast.plugins.groups import CORE_DISTRIBUTION

_log = logging.getLogger("rollcast.plugins")

_VALUE = re.compile(r"^(?P<module>\w+(\.\w+)*)\s*(:\s*(?P<attr>\w+(\.\w+)*)\s*)?(\[.*\]\s*)?$")


@dataclass(frozen=True)
class PartInfo:
    """One part as it is announced; nothing of it is imported.

    Attributes:
        group, name: where the part is found.
        value: the entry point's ``module:attr``, or where an in-process part was defined.
        distribution: normalised name of the distribution; empty for an in-process part.
        version: the distribution's version; empty for an in-process part.
        requires_core: the specifier of the distribution's own ``Requires-Dist: rollcast``, such
            as ``~=0.1.0``; None if it names no range.
    """

    group: str
    name: str
    value: str
    distribution: str = ""
    version: str = ""
    requires_core: str | None = None

    @property
    def module(self) -> str:
        """The module part of ``value``; empty if ``value`` is malformed."""
        match = _VALUE.match(self.value)
        return match["module"] if match else ""

    @property
    def attr(self) -> str:
        """The attribute part of ``value``; empty if it names a module or is malformed."""
        match = _VALUE.match(self.value)
        return (match["attr"] or "") if match else ""

    @property
    def owner(self) -> str:
        """The providing distribution with its version, or ``in-process``."""
        return f"{self.distribution} {self.version}".strip() or "in-process"

    def __str__(self) -> str:
        return f"{self.owner} ({self.value})"


def normalize_name(name: str) -> str:
    """The form of a distribution's name in which two spellings compare equal (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def find_parts(group: str) -> tuple[PartInfo, ...]:
    """Every installed part of a group, sorted by name; nothing is imported.

    A name that two distributions claim appears once per distribution. A distribution that is on
    ``sys.path`` more than once (an editable install and a wheel, say) counts once: the first one
    on the path, which is also the one that Python imports.
    """
    return _parts_by_group(tuple(sys.path)).get(group, ())


def find_groups() -> tuple[str, ...]:
    """Every entry-point group that an installed distribution announces, sorted."""
    return tuple(sorted(_parts_by_group(tuple(sys.path))))


def find_claims(group: str, name: str) -> tuple[PartInfo, ...]:
    """The installed parts that claim a name; more than one is a conflict."""
    return tuple(part for part in find_parts(group) if part.name == name)


def find_core_version() -> str | None:
    """The installed version of the core, or None if it runs from a bare source tree."""
    return _core_version(tuple(sys.path))


def refresh() -> None:
    """Forget everything that was read, for example after ``pip install`` in a running notebook."""
    # Python itself remembers directory listings; without this a new folder may stay unseen.
    importlib.invalidate_caches()
    _parts_by_group.cache_clear()
    _core_version.cache_clear()


@functools.lru_cache(maxsize=8)
def _core_version(path: tuple[str, ...]) -> str | None:  # noqa: ARG001  # the cache key
    try:
        return importlib.metadata.version(CORE_DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.lru_cache(maxsize=8)
def _parts_by_group(path: tuple[str, ...]) -> dict[str, tuple[PartInfo, ...]]:  # noqa: ARG001  # the cache key
    # ``path`` is only the cache key: finders other than the path-based one answer too.
    groups: dict[str, dict[PartInfo, None]] = {}
    seen: set[str] = set()
    for candidate in importlib.metadata.distributions():
        # A text search, because parsing the metadata of every distribution of a large
        # environment takes longer than all the rest together.
        if CORE_DISTRIBUTION not in _entry_points_text(candidate):
            continue
        name = _distribution_name(candidate)
        if name is None or name in seen:
            continue
        seen.add(name)
        # Asking by name gives the first one on the path, even where that one announces nothing.
        for part in _read(importlib.metadata.distribution(name), name):
            groups.setdefault(part.group, {})[part] = None
    order = {group: sorted(parts, key=lambda part: part.name) for group, parts in groups.items()}
    return {group: tuple(parts) for group, parts in order.items()}


def _entry_points_text(distribution: importlib.metadata.Distribution) -> str:
    try:
        return distribution.read_text("entry_points.txt") or ""
    except (OSError, UnicodeDecodeError) as error:
        _log.warning("skipped an unreadable %s: %s", distribution.locate_file(""), error)
        return ""


def _distribution_name(distribution: importlib.metadata.Distribution) -> str | None:
    metadata = distribution.metadata
    # Asked for first, because a future Python raises for a key that is missing.
    name = str(metadata["Name"]) if "Name" in metadata else ""
    if not name:
        where = distribution.locate_file("")
        _log.warning("skipped a distribution without a name in its metadata, in %s", where)
        return None
    return normalize_name(name)


def _read(distribution: importlib.metadata.Distribution, name: str) -> list[PartInfo]:
    try:
        points = list(distribution.entry_points)
    except (TypeError, ValueError, AttributeError) as error:
        # importlib.metadata has no error of its own for a line that is not "name = value".
        _log.warning("skipped distribution %s: its entry_points.txt is malformed: %s", name, error)
        return []
    requires = _core_range(distribution, name)
    version = str(distribution.metadata["Version"]) if "Version" in distribution.metadata else ""
    return [PartInfo(p.group, p.name, p.value, name, version, requires) for p in points]


def _core_range(distribution: importlib.metadata.Distribution, name: str) -> str | None:
    from packaging.requirements import InvalidRequirement, Requirement

    ranges: list[str] = []
    for line in distribution.requires or ():
        if not normalize_name(line).startswith(CORE_DISTRIBUTION):
            continue
        try:
            requirement = Requirement(line)
        except InvalidRequirement as error:
            _log.warning("distribution %s has a malformed requirement %r: %s", name, line, error)
            continue
        if normalize_name(requirement.name) != CORE_DISTRIBUTION:
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if requirement.specifier:
            ranges.append(str(requirement.specifier))
    return ",".join(ranges) or None
