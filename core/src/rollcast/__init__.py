"""rollcast: reinforcement-learning post-training of language models from installable parts.

Public names resolve when they are first used: importing the package costs nothing and touches
nothing (no torch, no Ray, no logging set-up, no environment variable).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollcast.contracts.dispatch import DispatchMode
    from rollcast.contracts.pools import ResourcePool
    from rollcast.contracts.worker import ClassWithInitArgs
    from rollcast.controller.dispatch import Dispatch, Execute, register, register_dispatch_mode
    from rollcast.controller.hosting import WorkerHost
    from rollcast.controller.placement import ResourcePoolManager, start_groups
    from rollcast.controller.worker import Worker
    from rollcast.controller.worker_group import WorkerGroup
    from rollcast.errors import RollcastError
    from rollcast.protocol import DataProto, DataProtoFuture

_EXPORTS = {
    "ClassWithInitArgs": "rollcast.contracts.worker",
    "DataProto": "rollcast.protocol",
    "DataProtoFuture": "rollcast.protocol",
    "Dispatch": "rollcast.controller.dispatch",
    "DispatchMode": "rollcast.contracts.dispatch",
    "Execute": "rollcast.controller.dispatch",
    "ResourcePool": "rollcast.contracts.pools",
    "ResourcePoolManager": "rollcast.controller.placement",
    "RollcastError": "rollcast.errors",
    "Worker": "rollcast.controller.worker",
    "WorkerGroup": "rollcast.controller.worker_group",
    "WorkerHost": "rollcast.controller.hosting",
    "register": "rollcast.controller.dispatch",
    "register_dispatch_mode": "rollcast.controller.dispatch",
    "start_groups": "rollcast.controller.placement",
}

__all__ = [
    "ClassWithInitArgs",
    "DataProto",
    "DataProtoFuture",
    "Dispatch",
    "DispatchMode",
    "Execute",
    "ResourcePool",
    "ResourcePoolManager",
    "RollcastError",
    "Worker",
    "WorkerGroup",
    "WorkerHost",
    "__version__",
    "register",
    "register_dispatch_mode",
    "start_groups",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("rollcast")
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module 'rollcast' has no attribute {name!r}; it exports {', '.join(__all__)}")
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted(__all__)
