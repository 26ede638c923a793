"""Completion of overrides in a shell: options of config groups, names of plugins, keys with their present values."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Sequence

__all__ = ["complete_override"]


def complete_override(args: Sequence[str], incomplete: str) -> list[str]:
    """Return what the override under the cursor may become; imports no plugin but the packages of configuration.

    Args:
        args: words before the cursor. Bash makes three of ``recipe=quickstart``, and completes the third alone.
        incomplete: word under the cursor.
    """
    words = re.sub(r" ?= ?", "=", " ".join(args)).split(" ") if args else []
    last = words[-1] if words else ""
    # No override is a bare word, so a key that stands alone waits for its value.
    if last and "=" not in incomplete and (last.endswith("=") or "=" not in last):
        key = last.removesuffix("=")
        return [value for value in _values(key) if value.startswith(incomplete)]
    key, has_value, begun = incomplete.partition("=")
    if has_value:
        return [f"{key}={value}" for value in _values(key) if value.startswith(begun)]
    groups = [f"{group}={option}" for group in _groups() for option in _options(group) if group.startswith(key)]
    return [*groups, *_keys(words, key)]


def _groups() -> list[str]:
    """Return the config groups that can be chosen at the top level."""
    from rollcast.config.sources import find_sources

    folders = (folder for source in find_sources().found for folder in source.folder.iterdir())
    return sorted({folder.name for folder in folders if folder.is_dir() and any(folder.glob("*.yaml"))})


def _options(group: str) -> list[str]:
    from rollcast.config.sources import find_options

    return find_options(group)


def _values(key: str) -> list[str]:
    """Return the options of a config group, or the plugins that a key may name."""
    from rollcast.config.assembly import registry_modules
    from rollcast.plugins.registry import find_registries

    if options := _options(key):
        return options
    for module in registry_modules():
        importlib.import_module(module)
    return sorted({name for registry in find_registries() if key in registry.config_keys for name in registry.names()})


def _keys(words: Sequence[str], begun: str) -> Iterator[str]:
    """Yield the keys of the configuration that the words before choose, each with its value if that is a plain one."""
    from rollcast.config import compose
    from rollcast.contracts.config import flatten
    from rollcast.errors import RollcastError

    if not begun:
        return
    try:
        composed = compose(list(words), allow_missing=True)
    except RollcastError:
        return  # the command itself says what is wrong
    for key, value in flatten(composed.plain()).items():
        if key.startswith(begun):
            shown = re.fullmatch(r"[\w./-]+", str(value)) if value is not None else None
            yield f"{key}={str(value).lower() if isinstance(value, bool) else value}" if shown else f"{key}="
