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
    """Nodes of the cluster; the driver is on the first."""
    processes_per_node: Positive = 8
    """Worker processes that a node has room for."""
    latency_s: Annotated[float, Ge(0)] = 0.0
    """Seconds of the simulated clock that a call takes to its worker, and its result back."""
    bytes_per_s: Annotated[float, Gt(0)] | None = None
    """Rate of data between two nodes in bytes per second; null for infinitely fast."""
    call_s: dict[str, float] = field(default_factory=dict)
    """`role.method` → seconds of the simulated clock that the call takes on each rank; others take none."""
    kill_nodes_at_s: dict[int, float] = field(default_factory=dict)
    """Number of a node → moment of the simulated clock at which it is lost with its processes."""
