"""Schemas of the profilers; importable without torch."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from rollcast.contracts.config import Positive, config
from rollcast_automap.profiling.contract import ProfilerConfig

__all__ = ["NsysConfig", "TorchMemoryConfig", "TorchProfilerConfig"]


@config
class TorchProfilerConfig(ProfilerConfig):
    """Keys of ``profiler=torch``."""

    tool: str | None = "torch"
    """Registry name of the profiler."""
    contents: list[Literal["cpu", "cuda", "memory", "shapes", "stack"]] = field(default_factory=lambda: ["cpu", "cuda"])
    """Contents of the trace: `cpu`, `cuda`, `memory` (allocations), `shapes` (of operators' inputs), `stack`
    (Python's)."""


@config
class TorchMemoryConfig(ProfilerConfig):
    """Keys of ``profiler=torch_memory``."""

    tool: str | None = "torch_memory"
    """Registry name of the profiler."""
    trace_alloc_max_entries: Positive = 100_000
    """Number of allocations and frees to keep; older ones are dropped."""
    stack_depth: Positive = 32
    """Frames to show of a call's stack."""
    context: Literal["all", "alloc", "state"] = "all"
    """Entries that get a stack: `all`, `alloc` (allocations), or `state` (allocations alive at the end)."""
    stacks: Literal["all", "python"] = "python"
    """`all` for Python's and C++'s stacks, `python` for Python's."""


@config
class NsysConfig(ProfilerConfig):
    """Keys of ``profiler=nsys``."""

    tool: str | None = "nsys"
    """Registry name of the profiler."""
    trace: str = "cuda,nvtx,cublas"
    """APIs that Nsight Systems records, as in `nsys profile --trace`."""
    cuda_memory_usage: bool = True
    """Record the device's memory too."""
    cuda_graph_trace: Literal["graph", "node"] = "graph"
    """`graph` shows a CUDA graph as one entry, `node` shows its nodes."""
    options: dict[str, str] = field(default_factory=dict)
    """Further options of `nsys profile`, without the dashes."""
