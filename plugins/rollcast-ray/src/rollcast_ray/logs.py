"""The output that a worker's process left on its node, which the driver may not see."""

from __future__ import annotations

import logging
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rollcast.contracts.runtime import HostInfo
from rollcast_ray.ray_internals import log_folder

__all__ = ["read_last_lines", "read_worker_log"]

logger = logging.getLogger(__name__)

#: How long another node may take to start a process that reads the log, in seconds.
_READ_S = 10.0


def read_last_lines(folder: Path, worker_id: str, pid: int, count: int = 20) -> list[str]:
    """Return the last lines that a worker's process wrote to its output files in ``folder``.

    Args:
        folder: of the logs of the process's own node.
        worker_id, pid: of the process; process ids repeat across containers and in time, Ray's ids do not.
        count: number of lines.
    """
    files = sorted(folder.glob(f"worker-{worker_id}-*-{pid}.*"))
    lines = [line for file in files for line in file.read_text(errors="replace").splitlines()]
    return [line for line in lines if not line.startswith(":")][-count:]  # Ray marks its own lines so


def _read_here(worker_id: str, pid: int) -> list[str]:
    folder = log_folder()
    return [] if folder is None else read_last_lines(folder, worker_id, pid)


def read_worker_log(info: HostInfo) -> list[str]:
    """Return the last lines of a worker's output from its own node; empty if that node cannot be asked."""
    where = info.control
    if where is None:
        return []
    if where.node_id == ray.get_runtime_context().get_node_id():
        return _read_here(where.worker_id, info.pid)
    there = NodeAffinitySchedulingStrategy(where.node_id, soft=False)
    reading = ray.remote(_read_here).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
    ref = reading.remote(where.worker_id, info.pid)
    try:
        found: list[str] = ray.get(ref, timeout=_READ_S)
        return found
    except ray.exceptions.RayError as error:  # a GetTimeoutError too
        ray.cancel(ref)
        logger.warning("the output of process %d on node %s cannot be read: %s", info.pid, info.node, error)
        return []
