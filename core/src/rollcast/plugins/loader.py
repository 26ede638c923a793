"""Loading of one announced part, through stevedore, with its known traps handled.

- stevedore reads entry points from a cache in the user's home whose key is too coarse to notice
  every edit: :class:`_OnePart` hands it the entry point that we have just read, so that neither
  that cache nor stevedore's own table is consulted.
- It groups duplicates only if they are adjacent, and drops ``on_missing_entrypoints_callback``:
  conflicts and missing names are found by the registry, on metadata, before stevedore is asked.
- It lets an AssertionError escape and logs other failures: every failure becomes one
  :class:`PluginLoadError` here.
- Its ``driver`` property is wrong for falsy objects: the extension's ``plugin`` is taken.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import re
import sys
from typing import Any

from rollcast.errors import PluginLoadError, PluginVersionError
from rollcast.plugins.groups import CORE_DISTRIBUTION
from rollcast.plugins.metadata import PartInfo, find_core_version, normalize_name


def load_part(part: PartInfo, asked: str = "") -> object:
    """Import one announced part.

    Args:
        part: what to import.
        asked: a line for the error message that says who asked for it.

    Raises:
        PluginVersionError: its distribution does not support the installed core; nothing of it
            is imported then.
        PluginLoadError: its import failed, for whatever reason; the cause is chained.
    """
    complaint = find_version_complaint(part)
    if complaint is not None:
        raise PluginVersionError(join_lines(complaint, asked))
    if not part.module:
        message = f"{_failed(part)}: its value is not of the form 'module:attribute'"
        raise PluginLoadError(join_lines(message, asked))
    try:
        extensions = _manager_class()(part).extensions
    except KeyboardInterrupt:
        raise
    except BaseException as cause:  # SystemExit and the panics of native extensions included
        raise PluginLoadError(join_lines(_explain(part, cause), asked)) from cause
    return extensions[0].plugin


def join_lines(*lines: str) -> str:
    """The lines that are not empty, as one text."""
    return "\n".join(line for line in lines if line)


def find_version_complaint(part: PartInfo) -> str | None:
    """Why the installed core is outside the range that the part's distribution declares."""
    from packaging.specifiers import InvalidSpecifier, SpecifierSet
    from packaging.version import Version

    core = find_core_version()
    if core is None or part.requires_core is None:
        return None
    try:
        supported = SpecifierSet(part.requires_core, prereleases=True)
    except InvalidSpecifier:
        return f"{part} declares a malformed range of rollcast: {part.requires_core!r}"
    # A development version of 0.1.0 counts as 0.1.0, although it sorts before it.
    if supported.contains(core) or supported.contains(Version(core).base_version):
        return None
    return (
        f"{part} provides {part.name!r} in {part.group} for rollcast{part.requires_core}, "
        f"but rollcast {core} is installed.\n"
        f"Try: pip install --upgrade {part.distribution}"
    )


@functools.cache
def _manager_class() -> type[Any]:
    # Made on first use: importing stevedore costs time that metadata-only callers do not owe.
    from stevedore.named import NamedExtensionManager

    class _OnePart(NamedExtensionManager[Any]):
        """A manager whose only entry point is the one that it is given."""

        def __init__(self, part: PartInfo) -> None:
            point = importlib.metadata.EntryPoint(part.name, part.value, part.group)
            self._fresh = [point]
            super().__init__(
                part.group,
                [part.name],
                on_load_failure_callback=self._reraise,
                on_missing_entrypoints_callback=None,
            )

        def list_entry_points(self) -> list[importlib.metadata.EntryPoint]:
            return self._fresh

        @staticmethod
        def _reraise(_manager: Any, _point: Any, error: BaseException) -> None:
            raise error

    return _OnePart


def _failed(part: PartInfo) -> str:
    return f"{part} provides {part.name!r} in {part.group}, but could not be loaded"


def _explain(part: PartInfo, cause: BaseException) -> str:
    text = str(cause).strip() or "no message"
    lines = [f"{_failed(part)}: {type(cause).__name__}: {text}"]
    missing = _find_missing_module(cause)
    if missing is not None and missing.split(".")[0] != part.module.split(".")[0]:
        lines.append(missing_module_hint(part.distribution, missing))
    return "\n".join(lines)


def _find_missing_module(cause: BaseException) -> str | None:
    """The module that was not found, even if the plugin re-raised another error because of it."""
    seen: set[int] = set()
    error: BaseException | None = cause
    while error is not None and id(error) not in seen:
        if isinstance(error, ModuleNotFoundError) and error.name:
            return error.name
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None


def missing_module_hint(distribution: str, module: str) -> str:
    """What to do about a module that ``distribution`` imports and that cannot be found."""
    top = module.split(".")[0]
    if "." in module and _is_findable(top):
        return f"{top} is installed, but has no module {module}: its version may not fit."
    if top == CORE_DISTRIBUTION:
        return f"The installed {CORE_DISTRIBUTION} has no module {module}: its version may not fit."
    requirement = _find_requirement(distribution, top)
    if requirement is not None:
        return f"Try: pip install '{requirement}'"
    return f"Try: pip install {top}  (if the distribution is named like the module {top!r})"


def _is_findable(top: str) -> bool:
    # Asked first, because find_spec raises for a loaded module that has no spec.
    if top in sys.modules:
        return sys.modules[top] is not None
    return importlib.util.find_spec(top) is not None


def _find_requirement(distribution: str, module: str) -> str | None:
    """The requirement of the distribution, or its extra, that is named like the module."""
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        lines = importlib.metadata.requires(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for line in lines:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue  # reported where the metadata is read
        if normalize_name(requirement.name) != normalize_name(module):
            continue
        extra = re.search(r"extra\s*==\s*[\"']([^\"']+)[\"']", str(requirement.marker or ""))
        if extra:
            return f"{distribution}[{extra[1]}]"
        return f"{requirement.name}{requirement.specifier}"
    return None
