"""Plugins registered in this process, and their transfer to other processes.

Each process has one table, keyed by group and independent of the :class:`Registry` objects, because plugins can arrive
from the driver before their registry is created.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import pickle
import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

from rollcast.errors import PluginError, PluginLoadError


class HIDDEN:
    """A sentinel for hidden names in the table; a class, because classes are pickled by reference."""


class _Pickled(NamedTuple):
    data: bytes
    location: str


@dataclass
class Entry:
    """A registration; an object from a snapshot stays pickled until its first use."""

    group: str
    name: str
    obj: object
    arrived: bool = False

    @property
    def is_hidden(self) -> bool:
        """True if the registration hides its name."""
        return self.location == locate(HIDDEN)

    @property
    def location(self) -> str:
        """Definition of the object as ``module:attr``, without unpickling it."""
        return self.obj.location if isinstance(self.obj, _Pickled) else locate(self.obj)

    def load(self) -> object:
        """Return the object, unpickling it if necessary.

        Raises:
            PluginLoadError: the object came from a snapshot and cannot be unpickled in this process.
        """
        if isinstance(self.obj, _Pickled):
            try:
                self.obj = pickle.loads(self.obj.data)  # the driver of this run wrote it
            except Exception as cause:  # imports and __setstate__ run foreign code
                raise PluginLoadError(
                    f"plugin {self.name!r} of {self.group} was registered in-process on the driver, but cannot "
                    f"be rebuilt in this process: {type(cause).__name__}: {cause}\n"
                    "Put it in a module that workers can import, or behind an entry point of an installed distribution."
                ) from cause
        return self.obj

    def dump(self) -> _Pickled:
        """Pickle the object, by value if it is defined in ``__main__``.

        Raises:
            PluginError: the object cannot be pickled.
        """
        if isinstance(self.obj, _Pickled):
            return self.obj
        pickler: Any = pickle
        if importlib.util.find_spec("cloudpickle") is not None:
            pickler = importlib.import_module("cloudpickle")
        elif (getattr(self.obj, "__module__", None) or type(self.obj).__module__) == "__main__":
            raise PluginError(
                f"plugin {self.name!r} of {self.group} was defined in __main__ and cannot be sent to workers "
                "without cloudpickle: put it in an importable module or behind an entry point.\n"
                "Try: pip install cloudpickle"
            )
        try:
            return _Pickled(pickler.dumps(self.obj), self.location)
        except Exception as cause:  # __reduce__ is third-party code and may raise anything
            raise PluginError(
                f"plugin {self.name!r} of {self.group} cannot be sent to workers: {cause!r}\n"
                "Put it in an importable module, or behind an entry point of an installed distribution."
            ) from cause


_lock = threading.RLock()
_table: dict[tuple[str, str], Entry] = {}
_generation = 0
_installed: bytes | None = None


def generation() -> int:
    """Return a counter that increases whenever the plugins registered in this process change."""
    return _generation


def entries() -> list[Entry]:
    """Return the registrations of all groups, sorted by group and name."""
    with _lock:
        return [entry for _, entry in sorted(_table.items())]


def find(group: str, name: str) -> Entry | None:
    """Return the registration of a name; None if there is none."""
    return _table.get((group, name))


def locate(obj: object) -> str:
    """Return the definition of an object as ``module:attr``, like the value of an entry point."""
    if isinstance(obj, ModuleType):
        return obj.__name__
    named = obj if hasattr(obj, "__qualname__") else type(obj)
    return f"{getattr(named, '__module__', '?')}:{getattr(named, '__qualname__', '?')}"


def put(group: str, name: str, entry: Entry | None) -> None:
    """Set the registration of a name; None removes it."""
    global _generation  # noqa: PLW0603
    with _lock:
        _table.pop((group, name), None)
        if entry is not None:
            _table[group, name] = entry
        _generation += 1


@contextlib.contextmanager
def scoped(entry: Entry) -> Iterator[None]:
    """Register an entry inside a ``with`` block; restore the previous registration afterwards."""
    before = find(entry.group, entry.name)
    put(entry.group, entry.name, entry)
    try:
        yield
    finally:
        put(entry.group, entry.name, before)


def snapshot(groups: Collection[str] | None = None) -> bytes | None:
    """Pickle the in-process registrations of ``groups``, by default all, to be sent to workers; None if there are none.

    Classes and functions defined in ``__main__`` (a script, a notebook) are pickled by value if ``cloudpickle`` is
    installed; those in modules are pickled by reference.

    Raises:
        PluginError: a plugin cannot be pickled; the message names it.
    """
    chosen = [entry for entry in entries() if groups is None or entry.group in groups]
    # Pickled one by one, so that a plugin that the receiver never uses is never unpickled.
    return pickle.dumps([(entry.group, entry.name, *entry.dump()) for entry in chosen]) if chosen else None


def install_snapshot(data: bytes | None) -> None:
    """Install the plugins of a snapshot in this process, replacing those of an earlier snapshot.

    None removes the plugins of the earlier snapshot. Installing the same snapshot again changes nothing. Plugins are
    unpickled on first use, so the registries need not exist yet. The data is a pickle, so it must come from a trusted
    process of the same run.
    """
    global _generation, _installed  # noqa: PLW0603
    with _lock:
        if data == _installed:
            return
        arrived = pickle.loads(data) if data is not None else ()  # the driver of this run wrote it
        for key in [key for key, entry in _table.items() if entry.arrived]:
            del _table[key]
        for group, name, pickled, location in arrived:
            _table[group, name] = Entry(group, name, _Pickled(pickled, location), arrived=True)
        _installed = data
        _generation += 1
