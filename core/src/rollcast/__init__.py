"""rollcast: reinforcement-learning post-training of language models from installable parts.

Public names resolve when they are first used: importing the package costs nothing and touches
nothing (no torch, no Ray, no logging set-up, no environment variable).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollcast.controller.decorator import register
    from rollcast.controller.dispatch import Dispatch, DispatchMode, Execute, register_dispatch_mode
    from rollcast.controller.resource_pool import ResourcePool, ResourcePoolManager
    from rollcast.controller.worker import ClassWithInitArgs, Worker
    from rollcast.controller.worker_group import WorkerGroup
    from rollcast.errors import RollcastError
    from rollcast.protocol import DataProto, DataProtoFuture
    from rollcast.runtime.ray import RayResourcePool, RayWorkerGroup

_EXPORTS = {
    "ClassWithInitArgs": "rollcast.controller.worker",
    "DataProto": "rollcast.protocol",
    "DataProtoFuture": "rollcast.protocol",
    "Dispatch": "rollcast.controller.dispatch",
    "DispatchMode": "rollcast.controller.dispatch",
    "Execute": "rollcast.controller.dispatch",
    "RayResourcePool": "rollcast.runtime.ray",
    "RayWorkerGroup": "rollcast.runtime.ray",
    "ResourcePool": "rollcast.controller.resource_pool",
    "ResourcePoolManager": "rollcast.controller.resource_pool",
    "RollcastError": "rollcast.errors",
    "Worker": "rollcast.controller.worker",
    "WorkerGroup": "rollcast.controller.worker_group",
    "register": "rollcast.controller.decorator",
    "register_dispatch_mode": "rollcast.controller.dispatch",
}

__all__ = [
    "ClassWithInitArgs",
    "DataProto",
    "DataProtoFuture",
    "Dispatch",
    "DispatchMode",
    "Execute",
    "RayResourcePool",
    "RayWorkerGroup",
    "ResourcePool",
    "ResourcePoolManager",
    "RollcastError",
    "Worker",
    "WorkerGroup",
    "__version__",
    "register",
    "register_dispatch_mode",
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
