"""The output files of a worker's process on its node, which the driver may not be able to read directly."""

from __future__ import annotations

import logging
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rollcast.contracts.runtime import HostInfo
from rollcast_ray.ray_internals import log_folder

__all__ = ["read_last_lines", "read_worker_log"]

logger = logging.getLogger(__name__)

#: Time limit in seconds for another node to start a process that reads the log.
_READ_S = 10.0


def read_last_lines(folder: Path, worker_id: str, pid: int, count: int = 20) -> list[str]:
    """Return the last lines of a worker process's output files in ``folder``.

    Args:
        folder: log folder of Ray on the process's node.
        worker_id, pid: Ray's id and process id of the process. Process ids can repeat, across containers and over
            time; Ray's ids are unique.
        count: number of lines to return.
    """
    files = sorted(folder.glob(f"worker-{worker_id}-*-{pid}.*"))
    lines = [line for file in files for line in file.read_text(errors="replace").splitlines()]
    return [line for line in lines if not line.startswith(":")][-count:]  # Ray's own lines start with a colon


def _read_here(worker_id: str, pid: int) -> list[str]:
    folder = log_folder()
    return [] if folder is None else read_last_lines(folder, worker_id, pid)


def read_worker_log(info: HostInfo) -> list[str]:
    """Return the last lines of a worker's output, read on its node; empty if the node does not answer."""
    where = info.control
    if where is None:
        return []
    if where.node_id == ray.get_runtime_context().get_node_id():
        return _read_here(where.worker_id, info.pid)
    there = NodeAffinitySchedulingStrategy(where.node_id, soft=False)
    reading = ray.remote(_read_here).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
    ref = reading.remote(where.worker_id, info.pid)
    try:
        lines: list[str] = ray.get(ref, timeout=_READ_S)
        return lines
    except ray.exceptions.RayError as error:  # includes GetTimeoutError
        ray.cancel(ref)
        logger.warning("the output of process %d on node %s cannot be read: %s", info.pid, info.node, error)
        return []
