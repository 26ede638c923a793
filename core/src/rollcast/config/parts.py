"""Parts that a configuration names by plain keys, such as ``reward.name``: do they exist?"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rollcast.config.validation import origin_of
from rollcast.plugins.registry import Registry, find_registries

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["check_parts", "find_named_parts", "load_parts", "registry_modules"]


def _contract_modules() -> tuple[str, ...]:
    import rollcast.contracts

    return tuple(f"rollcast.contracts.{module.name}" for module in pkgutil.iter_modules(rollcast.contracts.__path__))


def registry_modules() -> tuple[str, ...]:
    """The core's modules that declare registries; importing them imports no part."""
    return (*_contract_modules(), "rollcast.config.sources")


def find_named_parts(config: DictConfig) -> Iterator[tuple[Registry[Any], str, str]]:
    """Registry, dotted key and name of every part that the config asks for by a registry's key."""
    from omegaconf import OmegaConf

    for module in registry_modules():
        importlib.import_module(module)
    for registry in find_registries():
        for key in registry.config_keys:
            value = OmegaConf.select(config, key, throw_on_missing=False)
            names = [value] if isinstance(value, str) else list(value) if OmegaConf.is_list(value) else []
            for name in names:
                yield registry, key, name


def check_parts(config: DictConfig, origins: Mapping[str, str]) -> None:
    """Refuse names that nothing provides, from metadata alone.

    Raises:
        PluginNotFoundError: lists what exists and the nearest.
        PluginConflictError: two distributions claim the name.
    """
    for registry, key, name in find_named_parts(config):
        registry.find(name, requested_by=f"{key} ({origin_of(key, origins)})")


def load_parts(config: DictConfig, origins: Mapping[str, str]) -> None:
    """Import every part that the config names, so that a broken one is found before anything starts.

    Raises:
        PluginError: a part is missing, broken, or not what its group holds; the cause is chained.
    """
    loaded: set[tuple[str, str, str]] = set()
    # A plugin may declare registries of its own (an engine's optimizers), known once it is imported.
    while named := [each for each in find_named_parts(config) if (each[0].group, each[1], each[2]) not in loaded]:
        for registry, key, name in named:
            registry.get(name, requested_by=f"{key} ({origin_of(key, origins)})")
            loaded.add((registry.group, key, name))
