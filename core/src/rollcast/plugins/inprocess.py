"""Plugins registered in this process, and their way to another one.

One table per process, keyed by group and independent of the :class:`Registry` objects: plugins that
arrive from the driver wait in it until their registry is created.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import pickle
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

from rollcast.errors import PluginError, PluginLoadError


class HIDDEN:
    """Stands in the table for a name that is hidden; a class, because classes are pickled by reference."""


class _Pickled(NamedTuple):
    data: bytes
    location: str


@dataclass
class Entry:
    """One registration: the object, pickled until its first use if it arrived by a snapshot."""

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
        """The definition of the object as ``module:attr``; unpickles nothing."""
        return self.obj.location if isinstance(self.obj, _Pickled) else locate(self.obj)

    def load(self) -> object:
        """Return the object.

        Raises:
            PluginLoadError: it arrived by a snapshot and cannot be unpickled in this process.
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
        """Return the object pickled, by value if it is of ``__main__``.

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
        except Exception as cause:  # __reduce__ is the plugin's own code and may raise anything
            raise PluginError(
                f"plugin {self.name!r} of {self.group} cannot be sent to workers: {cause!r}\n"
                "Put it in an importable module, or behind an entry point of an installed distribution."
            ) from cause


_lock = threading.RLock()
_table: dict[tuple[str, str], Entry] = {}
_generation = 0
_installed: bytes | None = None


def generation() -> int:
    """Return a number that grows whenever the plugins registered in this process change."""
    return _generation


def entries() -> list[Entry]:
    """Return the registrations of all groups, sorted by group and name."""
    with _lock:
        return [entry for _, entry in sorted(_table.items())]


def find(group: str, name: str) -> Entry | None:
    """Return the registration of a name, or None."""
    return _table.get((group, name))


def locate(obj: object) -> str:
    """Return the definition of an object in the form of an entry point's value."""
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
    """Register an entry for the length of a ``with`` block; restore what was registered before."""
    before = find(entry.group, entry.name)
    put(entry.group, entry.name, entry)
    try:
        yield
    finally:
        put(entry.group, entry.name, before)


def snapshot() -> bytes | None:
    """Return everything registered in-process, in all groups, to be sent to workers; None if there is nothing.

    Classes and functions of ``__main__`` (a script, a notebook) travel by value if ``cloudpickle``
    is installed; what lives in a module travels by reference.

    Raises:
        PluginError: a plugin cannot be pickled; the message names it.
    """
    found = entries()
    # Pickled one by one: a plugin that the receiver never asks for can then do no harm.
    return pickle.dumps([(entry.group, entry.name, *entry.dump()) for entry in found]) if found else None


def install_snapshot(data: bytes | None) -> None:
    """Make the plugins of a snapshot available in this process, in place of those of an earlier one.

    None removes those of the earlier one. Installing the same snapshot again changes nothing.
    Plugins are unpickled on first use, so the registries need not exist yet. The bytes must come
    from a process of the same run: they are a pickle.
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
