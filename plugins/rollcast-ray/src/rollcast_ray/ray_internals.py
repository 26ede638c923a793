"""Every name of Ray that is not part of its public interface; no other module of this distribution uses one.

The names are there from Ray 2.52 to 2.60, the versions that ``pyproject.toml`` allows; a test imports each of them.
"""

from __future__ import annotations

import atexit
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import ray
from ray import _raylet
from ray._private import ray_constants
from ray._private import worker as ray_worker
from ray._private.state import available_resources_per_node
from ray._raylet import PlacementGroupID

__all__ = [
    "AUTHENTICATION_LOGGER",
    "actor_id",
    "available_resources_per_node",
    "forget_authentication",
    "log_folder",
    "loopback_only",
    "placement_group_id",
    "restore_excepthook",
    "session_lock",
    "skip_shutdown_at_exit",
    "started_processes",
    "task_id",
]

#: Name of the logger that warns at each start of a local Ray that it asks for its token.
AUTHENTICATION_LOGGER = "ray._private.authentication.authentication_token_setup"


def actor_id(handle: Any) -> str:
    """Return the id of an actor."""
    return str(handle._actor_id.hex())


def task_id(ref: Any) -> str:
    """Return the id of the task whose result the reference stands for."""
    return str(ref.task_id().hex())


def placement_group_id(key: str) -> Any:
    """Return the id object of a placement group."""
    return PlacementGroupID(bytes.fromhex(key))


def session_lock() -> AbstractContextManager[Any]:
    """Return the lock that ``ray.init`` and ``ray.shutdown`` take; a Ray without it leaves a gap of microseconds."""
    return getattr(ray_worker, "_connect_or_shutdown_lock", None) or nullcontext()


def log_folder() -> Path | None:
    """Return the folder of the output of this node's Ray processes; None without Ray."""
    node = ray_worker._global_node if ray.is_initialized() else None
    return None if node is None else Path(node.get_logs_dir_path())


@contextmanager
def loopback_only() -> Iterator[None]:
    """Have ``ray.init`` take 127.0.0.1 as the node's address, on which all its processes then listen.

    By itself it does so on macOS and Windows only, and it replaces a ``_node_ip_address`` of 127.0.0.1.
    """
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def forget_authentication() -> None:
    """Have Ray's native code read mode and token of authentication from the environment again; it reads each once."""
    native: Any = _raylet
    loader = getattr(native, "AuthenticationTokenLoader", None)
    if loader is not None:  # older Rays have no authentication
        loader.instance().reset_cache()
        native.Config.initialize("")


def started_processes() -> dict[str, subprocess.Popen[bytes]]:
    """Return the processes that ``ray.init`` started here, by the name of their kind; empty on a cluster."""
    node = ray_worker._global_node
    return {} if node is None else {kind: found[0].process for kind, found in node.all_processes.items()}


def skip_shutdown_at_exit() -> None:
    """Drop Ray's own shutdown at the exit of this process, which would wait for processes that have ended."""
    atexit.unregister(ray_worker.shutdown)


def restore_excepthook() -> None:
    """Undo Ray's hook for uncaught errors, which waits for the GCS before it shows one."""
    if sys.excepthook is ray_worker.custom_excepthook:
        sys.excepthook = ray_worker.normal_excepthook
