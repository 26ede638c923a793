"""Plugins that a configuration names by keys, such as ``reward.name``: do they exist?"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rollcast.config.sections import Sections
from rollcast.plugins import Registry
from rollcast.plugins.registry import find_registries

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["find_named", "registry_modules"]


def registry_modules() -> tuple[str, ...]:
    """The core's modules that declare registries; importing them imports no plugin."""
    import rollcast.contracts

    contracts = (f"rollcast.contracts.{module.name}" for module in pkgutil.iter_modules(rollcast.contracts.__path__))
    return (*contracts, "rollcast.config.sources")


def find_named(config: DictConfig, sections: Sections) -> Iterator[tuple[Registry[Any], str, str]]:
    """Registry, dotted key and name of every plugin that the config asks for by a registry's key.

    A key of a section that another one is like (``actor.engine.name``) is read in the others too.
    """
    from omegaconf import OmegaConf

    for module in registry_modules():
        importlib.import_module(module)
    likes = {each.path: each.hosts.like for each in sections.placed if each.hosts and each.hosts.like}
    for registry in find_registries():
        also = (f"{path}.name" for path, like in likes.items() if f"{like}.name" in registry.config_keys)
        for key in (*registry.config_keys, *also):
            value = OmegaConf.select(config, key, throw_on_missing=False)
            names = [value] if isinstance(value, str) else list(value) if OmegaConf.is_list(value) else []
            for name in names:
                yield registry, key, name
