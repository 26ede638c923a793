"""The one way to find a part: by group and name, loaded when it is asked for and not before."""

from __future__ import annotations

import contextlib
import difflib
import sys
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar, cast, overload

from rollcast.errors import (
    PluginConflictError,
    PluginNotFoundError,
    PluginTypeError,
)
from rollcast.plugins import inprocess
from rollcast.plugins.expect import Check, any_of, instance_of, is_callable, subclass_of
from rollcast.plugins.groups import CORE_DISTRIBUTION, FIRST_PARTY, GROUPS, find_provider
from rollcast.plugins.inprocess import generation, install_snapshot, snapshot
from rollcast.plugins.loader import join_lines, load_part
from rollcast.plugins.metadata import PartInfo, find_claims, find_core_version, find_parts

__all__ = [
    "Check",
    "Registry",
    "any_of",
    "find_registries",
    "find_registry",
    "generation",
    "install_snapshot",
    "instance_of",
    "is_callable",
    "snapshot",
    "subclass_of",
]

T = TypeVar("T")
U = TypeVar("U")

_MISSING: Any = object()
_registries: dict[str, Registry[Any]] = {}


class Registry(Generic[T]):
    """The parts of one group: those of installed distributions, and those of this process.

    Creating a registry reads nothing and imports nothing. There is one per group in a process;
    :func:`find_registry` gives it.

    Example::

        engines: Registry[type[Engine]] = Registry(
            "rollcast.engines", subclass_of(Engine), config_key="actor.engine.name"
        )
        engine_class = engines.get("fsdp")

    Args:
        group: the entry-point group, such as ``rollcast.engines``.
        expect: looks at each part before anyone gets it; see :func:`subclass_of`,
            :func:`instance_of`, :func:`is_callable` and :func:`any_of`.
        config_key: the configuration key, or keys, by which parts are asked for: a composed
            configuration is checked against them, and messages name the first.

    Raises:
        PluginConflictError: another module has declared a registry for this group.
    """

    def __init__(self, group: str, expect: Check, config_key: str | tuple[str, ...] = ()) -> None:
        self.group = group
        self.expect = expect
        self.config_keys = (config_key,) if isinstance(config_key, str) else config_key
        self.defined_in = _find_caller()
        self._loaded: dict[PartInfo, T] = {}
        other = _registries.get(group)
        # The same module may run twice: a reload, or a cell of a notebook.
        if other is not None and other.defined_in != self.defined_in:
            raise PluginConflictError(
                f"{self.defined_in} declares a registry for {group}, which {other.defined_in} "
                "already declares; ask find_registry for it instead"
            )
        _registries[group] = self

    def __repr__(self) -> str:
        return f"Registry({self.group!r}, {len(self)} parts)"

    def names(self) -> tuple[str, ...]:
        """Every name that can be asked for, sorted; imports nothing."""
        installed = {part.name for part in find_parts(self.group)}
        return tuple(sorted(installed.union(inprocess.find_names(self.group))))

    def __contains__(self, name: object) -> bool:
        return name in self.names()

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __len__(self) -> int:
        return len(self.names())

    def find(self, name: str, requested_by: str | None = None) -> PartInfo:
        """Who provides a part; imports nothing.

        Args:
            name: the part.
            requested_by: the configuration key, or whatever else asks, for the error message.

        Raises:
            PluginNotFoundError: nobody provides it.
            PluginConflictError: two distributions claim it.
        """
        if inprocess.has(self.group, name):
            return PartInfo(self.group, name, inprocess.find_location(self.group, name))
        claims = find_claims(self.group, name)
        asked = self._asked(requested_by)
        if not claims:
            raise PluginNotFoundError(_explain_not_found(self.group, name, self.names(), asked))
        if len(claims) > 1:
            raise PluginConflictError(join_lines(explain_conflict(claims), asked))
        return claims[0]

    def get(self, name: str, requested_by: str | None = None) -> T:
        """The part itself; imports it, and only it, on the first call.

        Args:
            name: the part.
            requested_by: the configuration key, or whatever else asks, for the error message;
                the registry's first ``config_key`` if not given.

        Raises:
            PluginNotFoundError: nobody provides it.
            PluginConflictError: two distributions claim it.
            PluginVersionError: its distribution does not support the installed core.
            PluginLoadError: importing it failed; the cause is chained.
            PluginTypeError: it is not what the group holds.
        """
        part = self.find(name, requested_by)
        asked = self._asked(requested_by)
        if not part.distribution:
            obj = inprocess.lookup(self.group, name)
            self._check(part, obj, asked)
            return cast(T, obj)
        if part not in self._loaded:
            obj = load_part(part, asked)
            self._check(part, obj, asked)
            self._loaded[part] = cast(T, obj)
        return self._loaded[part]

    @overload
    def register(self, name: str, obj: T, *, replace: bool = False) -> T: ...

    @overload
    def register(self, name: str, *, replace: bool = False) -> Callable[[U], U]: ...

    def register(self, name: str, obj: Any = _MISSING, *, replace: bool = False) -> Any:
        """Add a part in this process: for tests, notebooks, scripts.

        Without ``obj`` it is a decorator: ``@registry.register("mine")``. Registering the very
        object that the name already stands for changes nothing.

        Args:
            name: the part.
            obj: what :meth:`get` will return.
            replace: take the name over from an installed or registered part.

        Returns:
            ``obj`` unchanged.

        Raises:
            PluginConflictError: the name is taken and ``replace`` is false.
            PluginTypeError: ``obj`` is not what the group holds, or the name is not a string.
        """
        if obj is _MISSING:
            return lambda decorated: self.register(name, decorated, replace=replace)
        if not isinstance(name, str) or not name:
            raise PluginTypeError(f"a part of {self.group} needs a name, got {name!r}")
        info = PartInfo(self.group, name, inprocess.locate(obj))
        self._check(info, obj)
        claims = find_claims(self.group, name)
        if not replace:
            # A module that both registers a part and announces it states one fact twice.
            if any(claim.value == info.value for claim in claims):
                return obj
            if claims:
                raise PluginConflictError(
                    f"cannot register {name!r} in {self.group}: {claims[0]} provides it; "
                    "choose another name, or pass replace=True"
                )
            if inprocess.is_local(self.group, name):
                other = inprocess.lookup(self.group, name)
                if other is obj:
                    return obj
                raise PluginConflictError(
                    f"cannot register {name!r} in {self.group}: {inprocess.locate(other)} is "
                    "already registered in this process; choose another name, or pass replace=True"
                )
        inprocess.put(self.group, name, obj)
        return obj

    def unregister(self, name: str) -> None:
        """Take back an in-process part; an installed one of that name becomes visible again.

        Raises:
            PluginNotFoundError: no such part is registered in-process.
        """
        try:
            inprocess.remove(self.group, name)
        except KeyError:
            mine = ", ".join(sorted(inprocess.find_names(self.group))) or "none"
            raise PluginNotFoundError(
                f"{name!r} is not registered in-process in {self.group} (registered: {mine})"
            ) from None

    @contextlib.contextmanager
    def temporarily(self, name: str, obj: T) -> Iterator[T]:
        """Register a part for the length of a ``with`` block, over whatever has the name.

        Raises:
            PluginTypeError: ``obj`` is not what the group holds.
        """
        token = inprocess.save(self.group, name)
        self.register(name, obj, replace=True)
        try:
            yield obj
        finally:
            inprocess.restore(self.group, name, token)

    def _asked(self, requested_by: str | None) -> str:
        key = requested_by or next(iter(self.config_keys), None)
        return f"It was asked for by: {key}" if key else ""

    def _check(self, part: PartInfo, obj: object, asked: str = "") -> None:
        complaint = self.expect(obj)
        if complaint is not None:
            kind = GROUPS[self.group].description if self.group in GROUPS else self.group
            text = f"{part} does not fit as {part.name!r} in {self.group} ({kind}): it {complaint}"
            raise PluginTypeError(join_lines(text, asked))


def find_registry(group: str) -> Registry[Any]:
    """The registry of a group.

    Raises:
        PluginNotFoundError: no module that was imported so far declares one.
    """
    try:
        return _registries[group]
    except KeyError:
        known = ", ".join(sorted(_registries)) or "none"
        near = difflib.get_close_matches(group, GROUPS, n=1)
        hint = f"\nDid you mean {near[0]!r}?" if near and near[0] != group else ""
        raise PluginNotFoundError(
            f"no registry for {group!r} was declared in this process (declared: {known}){hint}"
        ) from None


def find_registries() -> tuple[Registry[Any], ...]:
    """Every registry that was declared in this process."""
    return tuple(_registries.values())


def explain_conflict(claims: tuple[PartInfo, ...]) -> str:
    """The message for a name that is claimed more than once."""
    first = claims[0]
    owners = sorted({claim.distribution for claim in claims})
    text = f"{first.name!r} in {first.group} is claimed by {' and by '.join(map(str, claims))}"
    if len(owners) == 1:
        return f"{text}: that distribution's entry_points.txt is broken; reinstall it."
    return f"{text}. Uninstall one of them: pip uninstall {' | '.join(owners)}"


def _explain_not_found(group: str, name: object, names: tuple[str, ...], asked: str) -> str:
    owners = {part.name: part.owner for part in find_parts(group)}
    listed = ", ".join(f"{each} ({owners.get(each, 'in-process')})" for each in names) or "nothing"
    lines = [f"no part {name!r} in {group}.", asked, f"Available: {listed}"]
    if isinstance(name, str):
        wanted = name
        known = sorted({*names, *FIRST_PARTY.get(group, {})})
        if find_provider(group, name) is None:
            near = difflib.get_close_matches(name, known, n=1)
            if near:
                lines.append(f"Did you mean {near[0]!r}?")
                wanted = near[0]
        provider = find_provider(group, wanted)
        if provider is not None and wanted not in names:
            lines.append(f"Try: pip install {provider}")
            if provider == CORE_DISTRIBUTION and find_core_version() is None:
                lines.append("(rollcast runs from a source tree that is not installed.)")
    return join_lines(*lines)


def _find_caller() -> str:
    """The module that creates a registry; ``Registry[T](…)`` goes through ``typing``."""
    depth = 1
    while True:
        try:
            module = sys._getframe(depth).f_globals.get("__name__", "?")
        except ValueError:
            return "?"
        if module not in (__name__, "typing"):
            return str(module)
        depth += 1
