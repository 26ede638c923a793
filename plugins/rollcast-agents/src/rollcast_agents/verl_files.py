"""verl's YAML files, which list classes with their arguments, and calls of objects that may be asynchronous."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rollcast.errors import ConfigError

__all__ = ["awaited", "import_class", "read_entries"]


async def awaited(value: Any) -> Any:
    """Return the value, or the result of the awaitable."""
    return await value if inspect.isawaitable(value) else value


def read_entries(key: str, path: str | Path, name: str) -> dict[str, Mapping[str, Any]]:
    """Return the entries of the list ``name`` in a file, by the words that name an entry in a message.

    Args:
        key: configuration key that names the file.
        path: YAML file.
        name: key of the list in the file.

    Raises:
        ConfigError: the file cannot be read, has no such list, or an entry names no class.
    """
    where = f"{key}={path}"
    try:
        loaded = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{where} cannot be read: {error}") from error
    entries = loaded.get(name) if isinstance(loaded, Mapping) else None
    if not isinstance(entries, list):
        raise ConfigError(f"{where} has no list {name!r}")
    entries_by_place = {f"{where}: {name}[{index}]": entry for index, entry in enumerate(entries)}
    for place, entry in entries_by_place.items():
        if not isinstance(entry, Mapping) or "." not in str(entry.get("class_name", "")):
            raise ConfigError(f"{place} has no class_name such as package.module.Class")
    return entries_by_place


def import_class(name: str) -> Any:
    """Return the object ``package.module.Class``.

    Raises:
        ImportError, AttributeError: there is none; importing runs the user's code, which may raise anything.
    """
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)
