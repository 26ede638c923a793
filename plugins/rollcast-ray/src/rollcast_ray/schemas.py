"""The keys of the section ``runtime`` for ``runtime=ray``. Imports neither Ray nor torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rollcast.contracts.runtime import RuntimeConfig

__all__ = ["RayRuntimeConfig"]


@dataclass
class RayRuntimeConfig(RuntimeConfig):
    """Workers in Ray actors.

    Attributes:
        address: of a Ray cluster to join; empty for ``RAY_ADDRESS`` or a Ray of this run's own.
        num_cpus: logical CPUs of an embedded Ray; empty for all cores, or more if there are more processes.
        object_store_memory: bytes of an embedded Ray's object store.
        log_to_driver: show the output of workers.
        runtime_env: Ray's runtime environment of the workers: ``env_vars``, ``pip``, ``working_dir`` and the rest.
    """

    name: str = "ray"
    address: str | None = None
    num_cpus: int | None = None
    object_store_memory: int | None = None
    log_to_driver: bool = False
    runtime_env: dict[str, Any] = field(default_factory=dict)
