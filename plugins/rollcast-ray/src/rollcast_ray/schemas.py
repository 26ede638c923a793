"""Schema of the section ``runtime`` for ``runtime=ray``. Imports neither Ray nor torch."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from rollcast.contracts.config import Positive, Seconds, config
from rollcast.contracts.runtime import RuntimeConfig

__all__ = ["RayRuntimeConfig"]


@config
class RayRuntimeConfig(RuntimeConfig):
    """Workers in Ray actors."""

    name: str = "ray"
    """Registry name of the runtime."""
    address: str | None = None
    """Address of a Ray cluster to join; null for `RAY_ADDRESS`, or an embedded Ray."""
    num_cpus: Positive | None = None
    """Logical CPUs of an embedded Ray; null for the number of cores, or of processes if there are more."""
    object_store_memory: Positive | None = None
    """Size of an embedded Ray's object store in bytes."""
    include_dashboard: bool = False
    """Start Ray's dashboard beside an embedded Ray, on the loopback address; needs `ray[default]`."""
    stop_grace_s: Seconds = 5.0
    """Grace period in seconds in which workers can close before they are killed."""
    log_to_driver: bool = False
    """Print the workers' output on the driver."""
    runtime_env: dict[str, Any] = field(default_factory=dict)
    """Ray's runtime environment of the workers: `env_vars`, `pip`, `working_dir` and other fields."""
