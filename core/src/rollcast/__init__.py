"""rollcast: plugin-based reinforcement-learning post-training of language models.

Public names are imported on first use: importing the package imports neither torch nor Ray, and changes
neither logging nor environment variables.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollcast._lazy import lazy_exports as lazy_exports

if TYPE_CHECKING:
    from rollcast._version import __version__ as __version__
    from rollcast.config.assembly import Composed as Composed
    from rollcast.config.assembly import compose as compose
    from rollcast.config.launch import train as train
    from rollcast.config.overrides import format_override as format_override
    from rollcast.config.sections import build_section as build_section
    from rollcast.contracts.dispatch import DispatchMode as DispatchMode
    from rollcast.contracts.pools import ResourcePool as ResourcePool
    from rollcast.contracts.worker import ClassWithInitArgs as ClassWithInitArgs
    from rollcast.controller.dispatch import Dispatch as Dispatch
    from rollcast.controller.dispatch import Execute as Execute
    from rollcast.controller.dispatch import register as register
    from rollcast.controller.dispatch import register_dispatch_mode as register_dispatch_mode
    from rollcast.controller.hosting import WorkerHost as WorkerHost
    from rollcast.controller.placement import ResourcePoolManager as ResourcePoolManager
    from rollcast.controller.placement import start_groups as start_groups
    from rollcast.controller.worker import Worker as Worker
    from rollcast.controller.worker_group import WorkerGroup as WorkerGroup
    from rollcast.errors import RollcastError as RollcastError
    from rollcast.protocol import DataProto as DataProto
    from rollcast.protocol import DataProtoFuture as DataProtoFuture

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "rollcast._lazy": ["lazy_exports"],
        "rollcast._version": ["__version__"],
        "rollcast.config.assembly": ["Composed", "compose"],
        "rollcast.config.launch": ["train"],
        "rollcast.config.overrides": ["format_override"],
        "rollcast.config.sections": ["build_section"],
        "rollcast.contracts.dispatch": ["DispatchMode"],
        "rollcast.contracts.pools": ["ResourcePool"],
        "rollcast.contracts.worker": ["ClassWithInitArgs"],
        "rollcast.controller.dispatch": ["Dispatch", "Execute", "register", "register_dispatch_mode"],
        "rollcast.controller.hosting": ["WorkerHost"],
        "rollcast.controller.placement": ["ResourcePoolManager", "start_groups"],
        "rollcast.controller.worker": ["Worker"],
        "rollcast.controller.worker_group": ["WorkerGroup"],
        "rollcast.errors": ["RollcastError"],
        "rollcast.protocol": ["DataProto", "DataProtoFuture"],
    },
)
