"""Installed plugins: read from the metadata of distributions, and loaded one at a time.

Entry points are read here and nowhere else. Each process reads them afresh, once per ``sys.path``,
and keeps nothing on disk, so an edited or reinstalled plugin is never seen stale.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import json
import logging
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, cast

from rollcast.errors import PluginLoadError, PluginVersionError

if TYPE_CHECKING:
    from packaging.requirements import Requirement

CORE_DISTRIBUTION = "rollcast"

_log = logging.getLogger("rollcast.plugins")
_VALUE = re.compile(r"^(?P<module>\w+(\.\w+)*)\s*(:\s*\w+(\.\w+)*\s*)?(\[.*\]\s*)?$")


@dataclass(frozen=True)
class PluginInfo:
    """A plugin as its distribution announces it; nothing of it is imported.

    Attributes:
        group, name: entry-point group and name.
        value: the entry point's ``module:attr``, or where an in-process plugin was defined.
        distribution: normalized name of the distribution; empty for an in-process plugin.
        version: version of the distribution; empty for an in-process plugin.
        requires_core: specifier of the distribution's own ``Requires-Dist: rollcast``, such as
            ``~=0.1.0``; None if it names no range.
    """

    group: str
    name: str
    value: str
    distribution: str = ""
    version: str = ""
    requires_core: str | None = None

    @property
    def module(self) -> str:
        """Module of ``value``; empty if ``value`` is malformed."""
        match = _VALUE.match(self.value)
        return match["module"] if match else ""

    @property
    def owner(self) -> str:
        """The providing distribution with its version, or ``in-process``."""
        return f"{self.distribution} {self.version}".strip() or "in-process"

    def __str__(self) -> str:
        return f"{self.owner} ({self.value})"


# -- reading metadata ------------------------------------------------------------------------------


def find_plugins(group: str) -> tuple[PluginInfo, ...]:
    """Return every installed plugin of a group, sorted by name, without importing any.

    A name that two distributions claim appears once per distribution. A distribution that is on
    ``sys.path`` twice (an editable install and a wheel) counts once: the first on the path, which
    is the one that Python imports.
    """
    return _read_all(tuple(sys.path)).get(group, ())


def find_groups() -> tuple[str, ...]:
    """Return every entry-point group in which a distribution announces a plugin, sorted."""
    return tuple(sorted(_read_all(tuple(sys.path))))


def find_claims(group: str, name: str) -> tuple[PluginInfo, ...]:
    """Return the installed plugins that ``name`` stands for; more than one is a conflict.

    Args:
        group: entry-point group.
        name: plain, or qualified by a distribution: ``distribution:name``.
    """
    distribution, _, plain = name.rpartition(":")
    owner = normalize_name(distribution)
    return tuple(p for p in find_plugins(group) if p.name == plain and owner in ("", p.distribution))


def find_core_version() -> str | None:
    """Return the installed version of the core; None if it runs from a bare source tree."""
    return _find_version(CORE_DISTRIBUTION, tuple(sys.path))


def refresh() -> None:
    """Forget the metadata read so far, for example after ``pip install`` in a running notebook."""
    # Python remembers directory listings too; without this call a new folder may stay unseen.
    importlib.invalidate_caches()
    for cached in (_read_all, _find_version, _missing_requirements):
        cached.cache_clear()


def normalize_name(name: str) -> str:
    """Return the form of a distribution's name in which two spellings compare equal (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


@functools.lru_cache(maxsize=512)
def _find_version(distribution: str, path: tuple[str, ...]) -> str | None:  # noqa: ARG001  # the cache key
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.lru_cache(maxsize=8)
def _read_all(path: tuple[str, ...]) -> dict[str, tuple[PluginInfo, ...]]:  # noqa: ARG001  # the cache key
    groups: dict[str, dict[PluginInfo, None]] = {}
    seen: set[str] = set()
    for candidate in importlib.metadata.distributions():
        # A text search first: parsing the metadata of every distribution of a large environment
        # takes longer than all the rest together.
        if CORE_DISTRIBUTION not in _entry_points_text(candidate):
            continue
        metadata = candidate.metadata
        if "Name" not in metadata:
            _log.warning("skipped a distribution without a name in its metadata, in %s", candidate.locate_file(""))
            continue
        name = normalize_name(str(metadata["Name"]))
        if name in seen:
            continue
        seen.add(name)
        # Looking up by name returns the first copy on the path, even if that one announces nothing.
        for plugin in _read(importlib.metadata.distribution(name), name):
            groups.setdefault(plugin.group, {})[plugin] = None
    return {group: tuple(sorted(plugins, key=lambda each: each.name)) for group, plugins in groups.items()}


def _entry_points_text(distribution: importlib.metadata.Distribution) -> str:
    try:
        return distribution.read_text("entry_points.txt") or ""
    except (OSError, UnicodeDecodeError) as error:
        _log.warning("skipped an unreadable %s: %s", distribution.locate_file(""), error)
        return ""


def _read(distribution: importlib.metadata.Distribution, name: str) -> list[PluginInfo]:
    try:
        points = list(distribution.entry_points)
    except (TypeError, ValueError, AttributeError) as error:
        # importlib.metadata has no error of its own for a line that is not "name = value".
        _log.warning("skipped distribution %s: its entry_points.txt is malformed: %s", name, error)
        return []
    core = [r for r in _requirements(distribution, CORE_DISTRIBUTION) if _applies(r) and r.specifier]
    supported = ",".join(str(requirement.specifier) for requirement in core) or None
    version = str(distribution.metadata["Version"]) if "Version" in distribution.metadata else ""
    return [PluginInfo(p.group, p.name, p.value, name, version, supported) for p in points]


def _requirements(distribution: importlib.metadata.Distribution, named: str = "") -> Iterator[Requirement]:
    """Yield what a distribution requires, extras included; only ``named`` if it is given."""
    from packaging.requirements import InvalidRequirement, Requirement

    for line in distribution.requires or ():
        if not normalize_name(line).startswith(normalize_name(named)):
            continue
        try:
            requirement = Requirement(line)
        except InvalidRequirement as error:
            _log.warning("%s has a malformed requirement %r: %s", distribution.name, line, error)
            continue
        if not named or normalize_name(requirement.name) == normalize_name(named):
            yield requirement


def _applies(requirement: Requirement) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


# -- problems that metadata shows ------------------------------------------------------------------


def find_version_complaint(plugin: PluginInfo) -> str | None:
    """Return why the installed core is outside the range that the plugin's distribution declares, or None."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    core = find_core_version()
    if core is None or plugin.requires_core is None:
        return None
    supported = SpecifierSet(plugin.requires_core, prereleases=True)
    # A development version of 0.1.0 counts as 0.1.0, although it sorts before it.
    if supported.contains(core) or supported.contains(Version(core).base_version):
        return None
    return (
        f"{plugin} provides {plugin.name!r} in {plugin.group} for rollcast{plugin.requires_core}, "
        f"but rollcast {core} is installed.\n"
        f"Try: pip install --upgrade {plugin.distribution}"
    )


def find_metadata_complaint(plugin: PluginInfo) -> str | None:
    """Return why loading the plugin is bound to fail, as far as metadata shows; None if nothing shows it.

    Imports nothing: a malformed value, a top-level module that no finder knows and a required
    distribution that is not installed are found, errors inside of modules are not.
    """
    if not plugin.module:
        return _malformed(plugin)
    top = plugin.module.split(".")[0]
    if not _is_findable(top):
        return f"there is no module {top!r}, which {plugin.value!r} names; reinstall {plugin.distribution}"
    missing = _missing_requirements(plugin.distribution, tuple(sys.path))
    if missing:
        listed = " ".join(f"'{each}'" for each in missing)
        return f"{plugin.distribution} requires distributions that are not installed. Try: pip install {listed}"
    return None


def _malformed(plugin: PluginInfo) -> str:
    return f"its value {plugin.value!r} is not of the form 'module:attribute'"


@functools.lru_cache(maxsize=512)
def _missing_requirements(distribution: str, path: tuple[str, ...]) -> tuple[str, ...]:
    found = [each for each in _requirements(importlib.metadata.distribution(distribution)) if _applies(each)]
    return tuple(f"{each.name}{each.specifier}" for each in found if _find_version(each.name, path) is None)


def _is_findable(top: str) -> bool:
    # Asked first, because find_spec raises for a loaded module that has no spec.
    if top in sys.modules:
        return sys.modules[top] is not None
    return importlib.util.find_spec(top) is not None


def find_source(plugin: PluginInfo) -> Path | None:
    """Return the file of a plugin's module without importing the module or a parent of it; None if there is none."""
    top, *rest = plugin.module.split(".")
    try:
        spec = importlib.util.find_spec(top) if top else None
    except (ImportError, ValueError):  # a loaded module without a spec
        return None
    if spec is None or not rest:
        return Path(spec.origin) if spec is not None and spec.has_location and spec.origin else None
    folders = [Path(folder, *rest[:-1]) for folder in spec.submodule_search_locations or ()]
    files = (folder / name for folder in folders for name in (f"{rest[-1]}.py", f"{rest[-1]}/__init__.py"))
    return next((file for file in files if file.is_file()), None)


# -- what could be installed -----------------------------------------------------------------------


class _Index(TypedDict):
    groups: dict[str, str]
    plugins: dict[str, dict[str, str]]


@functools.cache
def _index() -> _Index:
    # Generated by `nox -s index`; data, so that the core names no distribution in its code.
    return cast(_Index, json.loads(Path(__file__).with_name("known.json").read_text()))


def describe_groups() -> Mapping[str, str]:
    """Return the known groups with one line about each, without importing the modules that declare them."""
    return _index()["groups"]


def find_known(group: str) -> Mapping[str, str]:
    """Return the published plugins of a group, installed or not: name to distribution."""
    return _index()["plugins"].get(group, {})


# -- loading ---------------------------------------------------------------------------------------


def load_plugin(plugin: PluginInfo, asked: str = "") -> object:
    """Import one installed plugin.

    Args:
        plugin: the plugin to import.
        asked: a line for the error message that says who asked for it.

    Raises:
        PluginVersionError: its distribution does not support the installed core; nothing of the
            distribution is imported then.
        PluginLoadError: the import failed, for whatever reason; the cause is chained.
    """
    complaint = find_version_complaint(plugin)
    if complaint is not None:
        raise PluginVersionError(join_lines(complaint, asked))
    failed = f"{plugin} provides {plugin.name!r} in {plugin.group}, but could not be loaded"
    if not plugin.module:
        raise PluginLoadError(join_lines(f"{failed}: {_malformed(plugin)}", asked))
    try:
        extensions = _manager_class()(plugin).extensions
    except KeyboardInterrupt:
        raise
    except BaseException as cause:  # SystemExit and the panics of native extensions included
        text = f"{failed}: {type(cause).__name__}: {str(cause).strip() or 'no message'}"
        raise PluginLoadError(join_lines(text, _missing_module_hint(plugin, cause), asked)) from cause
    # Not the manager's `driver`, which is wrong for falsy objects.
    return extensions[0].plugin


def join_lines(*lines: str) -> str:
    """Return the lines that are not empty as one text."""
    return "\n".join(line for line in lines if line)


@functools.cache
def _manager_class() -> type[Any]:
    # Made on first use: callers that only read metadata do not pay for importing stevedore.
    from stevedore.named import NamedExtensionManager

    class _OnePlugin(NamedExtensionManager[Any]):
        """A manager of the one entry point it is given.

        stevedore's own table and its cache in the user's home are too coarse to notice every edit;
        neither is consulted. A failure is raised instead of logged.
        """

        def __init__(self, plugin: PluginInfo) -> None:
            self._point = importlib.metadata.EntryPoint(plugin.name, plugin.value, plugin.group)
            super().__init__(plugin.group, [plugin.name], on_load_failure_callback=self._reraise)

        def list_entry_points(self) -> list[importlib.metadata.EntryPoint]:
            return [self._point]

        @staticmethod
        def _reraise(_manager: Any, _point: Any, error: BaseException) -> None:
            raise error

    return _OnePlugin


def _missing_module_hint(plugin: PluginInfo, cause: BaseException) -> str:
    """Return what to do if a module of another distribution was not found; empty in any other case."""
    module = _find_missing_module(cause)
    top = module.split(".")[0]
    if not module or top == plugin.module.split(".")[0]:
        return ""
    if top == CORE_DISTRIBUTION or ("." in module and _is_findable(top)):
        return f"{top} is installed, but has no module {module}: its version may not fit."
    for requirement in _requirements(importlib.metadata.distribution(plugin.distribution), top):
        extra = re.search(r"extra\s*==\s*[\"']([^\"']+)[\"']", str(requirement.marker or ""))
        return f"Try: pip install '{f'{plugin.distribution}[{extra[1]}]' if extra else requirement}'"
    return f"Try: pip install {top}  (if the distribution is named like the module {top!r})"


def _find_missing_module(cause: BaseException) -> str:
    """Return the module that was not found, even if the plugin raised another error because of it."""
    seen: list[BaseException] = []
    error: BaseException | None = cause
    while error is not None and error not in seen:
        if isinstance(error, ModuleNotFoundError) and error.name:
            return error.name
        seen.append(error)
        error = error.__cause__ or error.__context__
    return ""
