"""Schema of the section ``runtime`` for ``runtime=simulated``. Imports no torch."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated

from rollcast.contracts.config import Ge, Gt, Positive, config
from rollcast.contracts.runtime import RuntimeConfig

__all__ = ["SimulatedRuntimeConfig"]


@config
class SimulatedRuntimeConfig(RuntimeConfig):
    """A cluster of any size in the driver's own process, for tests."""

    name: str = "simulated"
    """Registry name of the runtime."""
    nodes: Positive = 1
    """Number of nodes of the cluster; the driver is on the first node."""
    processes_per_node: Positive = 8
    """Largest number of worker processes on a node."""
    latency_s: Annotated[float, Ge(0)] = 0.0
    """Latency of sending a call, and of returning its result, in seconds of the simulated clock."""
    bytes_per_s: Annotated[float, Gt(0)] | None = None
    """Bandwidth between two nodes in bytes per second; null for infinite."""
    call_s: dict[str, float] = field(default_factory=dict)
    """`role.method` → duration of the call on each rank in seconds of the simulated clock; 0 for other methods."""
    kill_nodes_at_s: dict[int, float] = field(default_factory=dict)
    """Index of a node → time in seconds of the simulated clock at which the node and its processes are lost."""
