"""Registries, which find plugins by group and name and load them on first use."""

from __future__ import annotations

import contextlib
import difflib
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Generic, TypeVar, cast, overload

from rollcast.errors import PluginConflictError, PluginNotFoundError, PluginTypeError
from rollcast.plugins import inprocess
from rollcast.plugins.checks import Check
from rollcast.plugins.discovery import (
    PluginInfo,
    describe_groups,
    find_claims,
    find_known,
    find_plugins,
    join_lines,
    load_plugin,
)

__all__ = ["Registry", "explain_conflict", "find_registries", "find_registry"]

T = TypeVar("T")
U = TypeVar("U")

_MISSING: Any = object()
_registries: dict[str, Registry[Any]] = {}


class Registry(Generic[T]):
    """The plugins of one group, both installed and registered in this process.

    A registry declares its group. Creating a registry reads no metadata and imports nothing. Each group has one
    registry per process, which :func:`find_registry` returns.

    A name may be qualified by its distribution, ``some-dist:name``, which is required if two distributions claim the
    name.

    Example::

        engines: Registry[type[Engine]] = Registry(
            "rollcast.engines", subclass_of(Engine), "actor.engine.name", description="training engines"
        )
        engine_class = engines.get("fsdp")

    Args:
        group: entry-point group, such as ``rollcast.engines``.
        expect: check that each plugin must pass when it is loaded; see :func:`subclass_of`,
            :func:`instance_of`, :func:`is_callable` and :func:`any_of`.
        config_key: config key or keys whose values name plugins of the group. A composed configuration is checked for
            these keys, and messages name the first one.
        description: one-line description of the group's plugins, shown to users.
        probe: further check of a plugin, which may call it; ``rollcast plugins --check`` runs it, :meth:`get` does not.

    Raises:
        PluginConflictError: another module has declared a registry for this group.
    """

    def __init__(
        self,
        group: str,
        expect: Check,
        config_key: str | tuple[str, ...] = (),
        *,
        description: str = "",
        probe: Check | None = None,
    ) -> None:
        self.group = group
        self.expect = expect
        self.probe = probe
        self.config_keys = (config_key,) if isinstance(config_key, str) else config_key
        self.description = description
        self.defined_in = _find_caller()
        self._loaded: dict[PluginInfo, T] = {}
        other = _registries.get(group)
        # The same module may run twice, in a reload or a notebook cell.
        if other is not None and other.defined_in != self.defined_in:
            raise PluginConflictError(
                f"{self.defined_in} declares a registry for {group}, which {other.defined_in} "
                "already declares; get it with find_registry instead"
            )
        _registries[group] = self

    def __repr__(self) -> str:
        return f"Registry({self.group!r}, {len(self)} plugins)"

    def names(self) -> tuple[str, ...]:
        """Return all plain names that :meth:`get` accepts, sorted, without importing plugins."""
        is_shown = {plugin.name: True for plugin in find_plugins(self.group)}
        is_shown |= {entry.name: not entry.is_hidden for entry in inprocess.entries() if entry.group == self.group}
        return tuple(sorted(name for name, is_there in is_shown.items() if is_there))

    def __contains__(self, name: object) -> bool:
        return bool(self._candidates(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __len__(self) -> int:
        return len(self.names())

    def find(self, name: str, requested_by: str | None = None) -> PluginInfo:
        """Return the metadata of a plugin without importing it.

        Args:
            name: plain name, or ``distribution:name``.
            requested_by: config key or caller to name in an error message; by default the registry's first
                ``config_key``.

        Raises:
            PluginNotFoundError: no such plugin is installed or registered.
            PluginConflictError: two distributions claim the plain name.
        """
        candidates = self._candidates(name)
        if not candidates:
            raise PluginNotFoundError(self._explain_not_found(name, self._asked(requested_by)))
        if len(candidates) > 1:
            raise PluginConflictError(join_lines(explain_conflict(candidates), self._asked(requested_by)))
        return candidates[0]

    def get(self, name: str, requested_by: str | None = None) -> T:
        """Return a plugin; the first call imports this plugin and no other.

        Args:
            name, requested_by: see :meth:`find`.

        Raises:
            PluginNotFoundError, PluginConflictError: see :meth:`find`.
            PluginVersionError: the plugin's distribution does not support the installed core.
            PluginLoadError: the import failed; the cause is chained.
            PluginTypeError: the plugin does not pass the check of the group.
        """
        plugin, asked = self.find(name, requested_by), self._asked(requested_by)
        if plugin in self._loaded:
            return self._loaded[plugin]
        entry = None if plugin.distribution else inprocess.find(self.group, name)
        obj = cast(T, load_plugin(plugin, asked) if entry is None else entry.load())
        self._check(plugin, obj, asked)
        if entry is None:
            self._loaded[plugin] = obj
        return obj

    @overload
    def register(self, name: str, obj: T, *, replace: bool = False) -> T: ...

    @overload
    def register(self, name: str, *, replace: bool = False) -> Callable[[U], U]: ...

    def register(self, name: str, obj: Any = _MISSING, *, replace: bool = False) -> Any:
        """Register a plugin in this process, for tests, notebooks and scripts.

        Without ``obj``, the call is a decorator: ``@registry.register("mine")``. Registering the same object under its
        name again changes nothing.

        Args:
            name: plain name.
            obj: object that :meth:`get` will return; returned unchanged.
            replace: True to replace an installed or registered plugin of this name.

        Raises:
            PluginConflictError: the name is taken and ``replace`` is false.
            PluginTypeError: ``obj`` does not pass the check of the group, or the name is not a plain one.
        """
        if obj is _MISSING:
            return lambda decorated: self.register(name, decorated, replace=replace)
        entry = self._make_entry(name, obj)
        if not replace:
            claims = find_claims(self.group, name)
            # A module may both register a plugin and declare it as an entry point; that is no conflict.
            if any(claim.value == entry.location for claim in claims):
                return obj
            other = inprocess.find(self.group, name)
            if other is not None and other.obj is obj:
                return obj
            rivals = [f"{claim} provides it" for claim in claims]
            if other is not None and not other.arrived:
                rivals.append(f"{other.location} is already registered in this process")
            if rivals:
                raise PluginConflictError(
                    f"cannot register {name!r} in {self.group}: {rivals[0]}; choose another name, or pass replace=True"
                )
        inprocess.put(self.group, name, entry)
        return obj

    def unregister(self, name: str) -> None:
        """Remove an in-process plugin; an installed plugin of the same name becomes visible again.

        Raises:
            PluginNotFoundError: no such plugin is registered in-process.
        """
        if inprocess.find(self.group, name) is None:
            listed = ", ".join(entry.name for entry in inprocess.entries() if entry.group == self.group) or "none"
            raise PluginNotFoundError(f"{name!r} is not registered in-process in {self.group} (registered: {listed})")
        inprocess.put(self.group, name, None)

    @contextlib.contextmanager
    def temporarily(self, name: str, obj: T) -> Iterator[T]:
        """Register a plugin inside a ``with`` block, replacing any plugin of the same name.

        Raises:
            PluginTypeError: ``obj`` does not pass the check of the group, or the name is not a plain one.
        """
        with inprocess.scoped(self._make_entry(name, obj)):
            yield obj

    @contextlib.contextmanager
    def hidden(self, name: str) -> Iterator[None]:
        """Hide an installed or registered plugin inside a ``with`` block."""
        with inprocess.scoped(inprocess.Entry(self.group, name, inprocess.HIDDEN)):
            yield

    def _candidates(self, name: object) -> tuple[PluginInfo, ...]:
        if not isinstance(name, str):
            return ()
        entry = inprocess.find(self.group, name)
        if entry is None:
            return find_claims(self.group, name)
        return () if entry.is_hidden else (PluginInfo(self.group, name, entry.location),)

    def _make_entry(self, name: object, obj: object) -> inprocess.Entry:
        if not isinstance(name, str) or not name or ":" in name:
            raise PluginTypeError(f"a plugin of {self.group} needs a name without a colon, got {name!r}")
        entry = inprocess.Entry(self.group, name, obj)
        self._check(PluginInfo(self.group, name, entry.location), obj)
        return entry

    def _asked(self, requested_by: str | None) -> str:
        key = requested_by or next(iter(self.config_keys), None)
        return f"It was asked for by: {key}" if key else ""

    def _check(self, plugin: PluginInfo, obj: object, asked: str = "") -> None:
        complaint = self.expect(obj)
        if complaint is not None:
            kind = f" ({self.description})" if self.description else ""
            text = f"{plugin} does not fit as {plugin.name!r} in {self.group}{kind}: it {complaint}"
            raise PluginTypeError(join_lines(text, asked))

    def _explain_not_found(self, name: str, asked: str) -> str:
        names, known = self.names(), find_known(self.group)
        owners = {plugin.name: plugin.owner for plugin in find_plugins(self.group)}
        listed = (
            ", ".join(f"{plugin_name} ({owners.get(plugin_name, 'in-process')})" for plugin_name in names) or "nothing"
        )
        lines = [f"no plugin {name!r} in {self.group}.", asked, f"Available: {listed}"]
        wanted = str(name).rpartition(":")[2]
        if wanted not in known or wanted in names:
            candidates = {*names, *known, *(f"{p.distribution}:{p.name}" for p in find_plugins(self.group))}
            for near in difflib.get_close_matches(str(name), sorted(candidates), n=1):
                lines.append(f"Did you mean {near!r}?")
                wanted = near
        if wanted in known and wanted not in names:
            lines.append(f"Try: pip install {known[wanted]}")
        return join_lines(*lines)


def find_registry(group: str) -> Registry[Any]:
    """Return the registry of a group.

    Raises:
        PluginNotFoundError: no module imported so far declares a registry for the group.
    """
    if group in _registries:
        return _registries[group]
    declared = ", ".join(sorted(_registries)) or "none"
    near = [
        match for match in difflib.get_close_matches(group, {*_registries, *describe_groups()}, n=1) if match != group
    ]
    hint = f"\nDid you mean {near[0]!r}?" if near else ""
    raise PluginNotFoundError(f"no registry for {group!r} was declared in this process (declared: {declared}){hint}")


def find_registries() -> tuple[Registry[Any], ...]:
    """Return every registry declared in this process."""
    return tuple(_registries.values())


def explain_conflict(claims: tuple[PluginInfo, ...]) -> str:
    """Return the message for a name that several plugins claim."""
    first = claims[0]
    owners = sorted({claim.distribution for claim in claims})
    text = f"{first.name!r} in {first.group} is claimed by {' and by '.join(map(str, claims))}"
    if len(owners) == 1:
        return f"{text}: that distribution's entry_points.txt is broken; reinstall it."
    qualified = " or ".join(f"{owner}:{first.name}" for owner in owners)
    return f"{text}. Ask for {qualified}, or uninstall one of them: pip uninstall {' | '.join(owners)}"


def _find_caller() -> str:
    """Return the module that creates a registry, skipping the frames of ``typing`` for ``Registry[T](…)``."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "?") in (__name__, "typing"):
        frame = frame.f_back
    return "?" if frame is None else str(frame.f_globals.get("__name__", "?"))
