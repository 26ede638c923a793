"""Discovery, loading and checking of plugins; see :class:`Registry`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollcast._lazy import lazy_exports

if TYPE_CHECKING:
    from rollcast.plugins.checks import Check as Check
    from rollcast.plugins.checks import any_of as any_of
    from rollcast.plugins.checks import instance_of as instance_of
    from rollcast.plugins.checks import is_callable as is_callable
    from rollcast.plugins.checks import is_class as is_class
    from rollcast.plugins.checks import subclass_of as subclass_of
    from rollcast.plugins.discovery import PluginInfo as PluginInfo
    from rollcast.plugins.registry import Registry as Registry
    from rollcast.plugins.registry import find_registry as find_registry

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "rollcast.plugins.checks": ["Check", "any_of", "instance_of", "is_callable", "is_class", "subclass_of"],
        "rollcast.plugins.discovery": ["PluginInfo"],
        "rollcast.plugins.registry": ["Registry", "find_registry"],
    },
)
