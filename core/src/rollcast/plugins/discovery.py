"""Discovery of installed plugins from the metadata of distributions, and loading of single plugins.

Entry points are read only in this module. Each process reads them once per ``sys.path`` and caches nothing on disk,
so edited and reinstalled plugins are always up to date.
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
    """A plugin as declared by its distribution, without importing it.

    Attributes:
        group, name: entry-point group and name.
        value: the entry point's ``module:attr``, or the definition of an in-process plugin.
        distribution: normalized name of the distribution; empty for an in-process plugin.
        version: version of the distribution; empty for an in-process plugin.
        requires_core: version specifier of the distribution's ``Requires-Dist: rollcast``, such as ``~=0.1.0``; None
            if it has none.
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
    """Return all installed plugins of a group, sorted by name, without importing them.

    A name that two distributions claim appears once per distribution. A distribution that is on ``sys.path`` twice (an
    editable install and a wheel) appears once: the first on the path, which Python would import.
    """
    return _read_all(tuple(sys.path)).get(group, ())


def find_groups() -> tuple[str, ...]:
    """Return all entry-point groups in which a distribution declares a plugin, sorted."""
    return tuple(sorted(_read_all(tuple(sys.path))))


def find_claims(group: str, name: str) -> tuple[PluginInfo, ...]:
    """Return the installed plugins with this name; more than one is a conflict.

    Args:
        group: entry-point group.
        name: plain name, or a name qualified by its distribution, ``distribution:name``.
    """
    distribution, _, plain = name.rpartition(":")
    owner = normalize_name(distribution)
    return tuple(p for p in find_plugins(group) if p.name == plain and owner in ("", p.distribution))


def find_core_version() -> str | None:
    """Return the installed version of the core; None if it runs from a bare source tree."""
    return _find_version(CORE_DISTRIBUTION, tuple(sys.path))


def refresh() -> None:
    """Clear the cached metadata, for example after ``pip install`` in a running notebook."""
    # Python caches directory listings too; without this call, it may not find a new folder.
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
        # Search the text before parsing, because parsing the metadata of all distributions of a large environment
        # takes longer than everything else.
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
        # A lookup by name returns the first copy on the path, even if that copy declares no plugins.
        for plugin in _read(importlib.metadata.distribution(name), name):
            groups.setdefault(plugin.group, {})[plugin] = None
    return {group: tuple(sorted(plugins, key=lambda info: info.name)) for group, plugins in groups.items()}


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
    """Yield the requirements of a distribution, including extras; only those for ``named`` if given."""
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
    """Return a message if the installed core is outside the range declared by the plugin's distribution, else None."""
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
    """Return the reason why loading the plugin will fail, as far as its metadata shows; None if none is found.

    Nothing is imported. The check finds a malformed value, a missing top-level module and a required distribution that
    is not installed, but no errors inside modules.
    """
    if not plugin.module:
        return _malformed(plugin)
    top = plugin.module.split(".")[0]
    if not _is_findable(top):
        return f"there is no module {top!r}, which {plugin.value!r} names; reinstall {plugin.distribution}"
    missing = _missing_requirements(plugin.distribution, tuple(sys.path))
    if missing:
        listed = " ".join(f"'{requirement}'" for requirement in missing)
        return f"{plugin.distribution} requires distributions that are not installed. Try: pip install {listed}"
    return None


def _malformed(plugin: PluginInfo) -> str:
    return f"its value {plugin.value!r} is not of the form 'module:attribute'"


@functools.lru_cache(maxsize=512)
def _missing_requirements(distribution: str, path: tuple[str, ...]) -> tuple[str, ...]:
    requirements = [
        requirement
        for requirement in _requirements(importlib.metadata.distribution(distribution))
        if _applies(requirement)
    ]
    return tuple(
        f"{requirement.name}{requirement.specifier}"
        for requirement in requirements
        if _find_version(requirement.name, path) is None
    )


def _is_findable(top: str) -> bool:
    # Checked first, because find_spec raises for a loaded module without a spec.
    if top in sys.modules:
        return sys.modules[top] is not None
    return importlib.util.find_spec(top) is not None


def find_source(plugin: PluginInfo) -> Path | None:
    """Return the file of a plugin's module without importing the module or its parents; None if there is none."""
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


# -- index of published plugins --------------------------------------------------------------------


class _Index(TypedDict):
    groups: dict[str, str]
    plugins: dict[str, dict[str, str]]


@functools.cache
def _index() -> _Index:
    # Generated by `nox -s index`; data, so that the core names no distribution in its code.
    return cast(_Index, json.loads(Path(__file__).with_name("known.json").read_text()))


def describe_groups() -> Mapping[str, str]:
    """Return a one-line description of each known group, without importing the modules that declare them."""
    return _index()["groups"]


def find_known(group: str) -> Mapping[str, str]:
    """Return the published plugins of a group, installed or not, as name → distribution."""
    return _index()["plugins"].get(group, {})


# -- loading ---------------------------------------------------------------------------------------


def load_plugin(plugin: PluginInfo, asked: str = "") -> object:
    """Import one installed plugin.

    Args:
        plugin: the plugin to import.
        asked: line for the error message that names the config key or caller that requested the plugin.

    Raises:
        PluginVersionError: the plugin's distribution does not support the installed core; nothing was imported.
        PluginLoadError: the import failed for any reason; the cause is chained.
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
    except BaseException as cause:  # includes SystemExit and the panics of native extensions
        text = f"{failed}: {type(cause).__name__}: {str(cause).strip() or 'no message'}"
        raise PluginLoadError(join_lines(text, _missing_module_hint(plugin, cause), asked)) from cause
    # The manager's `driver` is wrong for falsy objects.
    return extensions[0].plugin


def join_lines(*lines: str) -> str:
    """Join the lines that are not empty."""
    return "\n".join(line for line in lines if line)


@functools.cache
def _manager_class() -> type[Any]:
    # Defined on first use, so that callers that only read metadata do not import stevedore.
    from stevedore.named import NamedExtensionManager

    class _OnePlugin(NamedExtensionManager[Any]):
        """A stevedore manager for a single given entry point.

        It bypasses stevedore's table and its cache in the user's home, which can miss edits. A failure is raised
        instead of logged.
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
    """Return a hint if a module of another distribution is missing; empty for any other cause."""
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
    """Return the name of the missing module, even if the plugin raised another error because of it."""
    seen: list[BaseException] = []
    error: BaseException | None = cause
    while error is not None and error not in seen:
        if isinstance(error, ModuleNotFoundError) and error.name:
            return error.name
        seen.append(error)
        error = error.__cause__ or error.__context__
    return ""
