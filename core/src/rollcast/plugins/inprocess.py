"""Parts that were registered in this process, and how they travel to another one.

The table is one per process and keyed by group, apart from the :class:`Registry` objects, so that
parts that arrive from the driver wait here until their registry is created.
"""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import threading
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from rollcast.errors import PluginError, PluginLoadError


@dataclass(frozen=True)
class _Pickled:
    data: bytes
    location: str


@dataclass
class _Entry:
    obj: object
    arrived: bool  # by a snapshot, not by a registration in this process


_lock = threading.RLock()
_table: dict[str, dict[str, _Entry]] = {}
_generation = 0
_installed: bytes | None = None


def generation() -> int:
    """A number that grows whenever the parts registered in this process change."""
    return _generation


def find_names(group: str) -> tuple[str, ...]:
    """The names registered in-process in a group."""
    with _lock:
        return tuple(_table.get(group, ()))


def find_groups() -> tuple[str, ...]:
    """The groups that have a part registered in-process."""
    with _lock:
        return tuple(group for group, entries in _table.items() if entries)


def has(group: str, name: str) -> bool:
    """Whether a part is registered in-process."""
    with _lock:
        return name in _table.get(group, {})


def is_local(group: str, name: str) -> bool:
    """Whether a part was registered by this process itself, not by a snapshot."""
    with _lock:
        entry = _table.get(group, {}).get(name)
        return entry is not None and not entry.arrived


def lookup(group: str, name: str) -> object:
    """The part, unpickled now if it arrived by a snapshot and was not asked for before.

    Raises:
        KeyError: it is not registered.
        PluginLoadError: it arrived, but cannot be unpickled in this process.
    """
    with _lock:
        entry = _table[group][name]
    if isinstance(entry.obj, _Pickled):
        # Unpickling may import modules, so it happens outside the lock.
        entry.obj = _unpickle(group, name, entry.obj)
    return entry.obj


def find_location(group: str, name: str) -> str:
    """Where a registered part was defined, as ``module:attr``; unpickles nothing.

    Raises:
        KeyError: it is not registered.
    """
    with _lock:
        obj = _table[group][name].obj
    return obj.location if isinstance(obj, _Pickled) else locate(obj)


def locate(obj: object) -> str:
    """Where an object was defined, in the form of an entry point's value."""
    if isinstance(obj, ModuleType):
        return obj.__name__
    named = obj if hasattr(obj, "__qualname__") else type(obj)
    return f"{getattr(named, '__module__', '?')}:{getattr(named, '__qualname__', '?')}"


def put(group: str, name: str, obj: object) -> None:
    """Register a part, in place of an earlier one of the same name."""
    with _lock:
        _table.setdefault(group, {})[name] = _Entry(obj, arrived=False)
        _advance()


def remove(group: str, name: str) -> None:
    """Take a part out again.

    Raises:
        KeyError: it is not registered.
    """
    with _lock:
        del _table[group][name]
        _advance()


def save(group: str, name: str) -> object:
    """A token for :func:`restore`: how the name stands now."""
    with _lock:
        return _table.get(group, {}).get(name)


def restore(group: str, name: str, token: object) -> None:
    """Bring a name back to where :func:`save` found it."""
    with _lock:
        entries = _table.setdefault(group, {})
        if isinstance(token, _Entry):
            entries[name] = token
        else:
            entries.pop(name, None)
        _advance()


def snapshot() -> bytes | None:
    """Everything registered in-process, in all groups, to be sent to workers.

    Classes and functions of ``__main__`` (a script, a notebook) travel by value if the package
    ``cloudpickle`` is installed; whatever lives in a module travels by reference.

    Returns:
        What :func:`install_snapshot` takes, or None if nothing is registered.

    Raises:
        PluginError: a part cannot be pickled; the message names it.
    """
    with _lock:
        entries = [
            (group, name, entry.obj) for group, names in sorted(_table.items()) for name, entry in sorted(names.items())
        ]
    if not entries:
        return None
    # Each part is pickled alone: a part that the receiver never asks for can then do no harm.
    parts: dict[str, dict[str, tuple[bytes, str]]] = {}
    for group, name, obj in entries:
        pickled = obj if isinstance(obj, _Pickled) else _pickle(group, name, obj)
        parts.setdefault(group, {})[name] = (pickled.data, pickled.location)
    return pickle.dumps(parts)


def install_snapshot(data: bytes | None) -> None:
    """Make the parts of a snapshot available in this process.

    They replace the parts of an earlier snapshot; None only takes those away. Installing the same
    snapshot again changes nothing. Parts are unpickled when they are asked for, so the registries
    need not exist yet. The bytes must come from a process of the same run: they are a pickle.
    """
    global _installed  # noqa: PLW0603
    with _lock:
        if data == _installed:
            return
        parts: dict[str, dict[str, tuple[bytes, str]]] = {}
        if data is not None:
            parts = pickle.loads(data)  # the driver of this run wrote it
        for names in _table.values():
            for name in [name for name, entry in names.items() if entry.arrived]:
                del names[name]
        for group, arrived in parts.items():
            entries = {name: _Entry(_Pickled(*each), arrived=True) for name, each in arrived.items()}
            _table.setdefault(group, {}).update(entries)
        _installed = data
        _advance()


def _advance() -> None:
    global _generation  # noqa: PLW0603
    _generation += 1


def _pickle(group: str, name: str, obj: object) -> _Pickled:
    home = getattr(obj, "__module__", None) or type(obj).__module__
    pickler: Any = pickle
    if importlib.util.find_spec("cloudpickle") is not None:
        pickler = importlib.import_module("cloudpickle")
    elif home == "__main__":
        raise PluginError(
            f"part {name!r} of {group} was defined in __main__ and cannot be sent to workers "
            "without cloudpickle: put it in an importable module or behind an entry point.\n"
            "Try: pip install cloudpickle"
        )
    try:
        return _Pickled(pickler.dumps(obj), locate(obj))
    except Exception as cause:  # __reduce__ is the part's own code and may raise anything
        raise PluginError(
            f"part {name!r} of {group} is registered in-process and cannot be sent to workers: "
            f"{type(cause).__name__}: {cause}\n"
            "Put it in an importable module, or behind an entry point of an installed distribution."
        ) from cause


def _unpickle(group: str, name: str, pickled: _Pickled) -> object:
    try:
        return pickle.loads(pickled.data)  # the driver of this run wrote it
    except Exception as cause:  # imports and __setstate__ run foreign code
        raise PluginLoadError(
            f"part {name!r} of {group} was registered in-process on the driver, but cannot be "
            f"rebuilt in this process: {type(cause).__name__}: {cause}\n"
            "Put it in a module that workers can import, or behind an entry point of an "
            "installed distribution."
        ) from cause
