"""All uses of Ray's private names; no other module of this distribution uses a private name.

The names exist in Ray 2.52 to 2.60, the versions that ``pyproject.toml`` allows; a test imports each of them.
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

#: Name of the logger that warns at each start of a local Ray that it requires a token.
AUTHENTICATION_LOGGER = "ray._private.authentication.authentication_token_setup"


def actor_id(handle: Any) -> str:
    """Return the id of an actor."""
    return str(handle._actor_id.hex())


def task_id(ref: Any) -> str:
    """Return the id of the task whose result ``ref`` refers to."""
    return str(ref.task_id().hex())


def placement_group_id(key: str) -> Any:
    """Return the id object of a placement group."""
    return PlacementGroupID(bytes.fromhex(key))


def session_lock() -> AbstractContextManager[Any]:
    """Return the lock of ``ray.init`` and ``ray.shutdown``; a Ray without the lock leaves a race of microseconds."""
    return getattr(ray_worker, "_connect_or_shutdown_lock", None) or nullcontext()


def log_folder() -> Path | None:
    """Return the folder with the output of this node's Ray processes; None without Ray."""
    node = ray_worker._global_node if ray.is_initialized() else None
    return None if node is None else Path(node.get_logs_dir_path())


@contextmanager
def loopback_only() -> Iterator[None]:
    """Make ``ray.init`` use 127.0.0.1 as the node's address, so that all its processes listen on loopback only.

    Ray does so by default only on macOS and Windows, and overrides a ``_node_ip_address`` of 127.0.0.1.
    """
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def forget_authentication() -> None:
    """Make Ray's native code reread the authentication mode and token, which it caches, from the environment."""
    native: Any = _raylet
    loader = getattr(native, "AuthenticationTokenLoader", None)
    if loader is not None:  # older versions of Ray have no authentication
        loader.instance().reset_cache()
        native.Config.initialize("")


def started_processes() -> dict[str, subprocess.Popen[bytes]]:
    """Return the processes that ``ray.init`` started, by their kind; empty if Ray joined a cluster."""
    node = ray_worker._global_node
    return {} if node is None else {kind: processes[0].process for kind, processes in node.all_processes.items()}


def skip_shutdown_at_exit() -> None:
    """Unregister Ray's shutdown at the exit of this process, which would wait for processes that have ended."""
    atexit.unregister(ray_worker.shutdown)


def restore_excepthook() -> None:
    """Remove Ray's hook for uncaught exceptions, which waits for the GCS before it shows one."""
    if sys.excepthook is ray_worker.custom_excepthook:
        sys.excepthook = ray_worker.normal_excepthook
