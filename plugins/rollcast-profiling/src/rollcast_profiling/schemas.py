"""Configuration of the profilers; importable without torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollcast.contracts.profiler import ProfilerConfig

__all__ = ["NsysConfig", "TorchMemoryConfig", "TorchProfilerConfig"]


@dataclass
class TorchProfilerConfig(ProfilerConfig):
    """Keys of ``profiler=torch``.

    Attributes:
        contents: what is recorded: ``cpu``, ``cuda``, ``memory`` (allocations), ``shapes`` (of operators'
            inputs), ``stack`` (Python's).
    """

    tool: str | None = "torch"
    contents: list[str] = field(default_factory=lambda: ["cpu", "cuda"])


@dataclass
class TorchMemoryConfig(ProfilerConfig):
    """Keys of ``profiler=torch_memory``.

    Attributes:
        trace_alloc_max_entries: allocations and frees that are kept, the latest.
        stack_depth: frames of a call's stack that are shown.
        context: which of them have a stack: ``all``, ``alloc``, or ``state`` (those that are alive at the end).
        stacks: ``all`` for Python's and C++'s, ``python`` for Python's.
    """

    tool: str | None = "torch_memory"
    trace_alloc_max_entries: int = 100_000
    stack_depth: int = 32
    context: str = "all"
    stacks: str = "python"


@dataclass
class NsysConfig(ProfilerConfig):
    """Keys of ``profiler=nsys``.

    Attributes:
        trace: what Nsight Systems records, as in ``nsys profile --trace``.
        cuda_memory_usage: record the device's memory too.
        cuda_graph_trace: ``graph`` shows a CUDA graph as one, ``node`` what is in it.
        options: further options of ``nsys profile``, without the dashes.
    """

    tool: str | None = "nsys"
    trace: str = "cuda,nvtx,cublas"
    cuda_memory_usage: bool = True
    cuda_graph_trace: str = "graph"
    options: dict[str, str] = field(default_factory=dict)
