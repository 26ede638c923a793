"""The memory of a process beyond its tensors: context, libraries, and the CUDA graphs of an inference engine."""

from __future__ import annotations

from dataclasses import dataclass

from rollcast_automap.contract import RoleSpec

__all__ = ["ProcessMemory", "find_process_memory"]

#: On a GPU: memory that vLLM reports outside torch's allocator with Llama 3 8B on one 80 GB device
#: (github.com/vllm-project/vllm/pull/10511; 3.58 GiB with two devices). It includes the NCCL buffers and the CUDA
#: context; github.com/pytorch/pytorch/issues/34323 reports 781 MB for a context with torch's kernels.
_GPU_BYTES = round(1.79 * 2**30)
#: CUDA graphs of a replica. vLLM: 0.21 GiB with Llama 3.2 1B (github.com/vllm-project/vllm/pull/11349), 1.4 GiB with
#: Llama 4 Maverick (github.com/sgl-project/sglang/issues/8538). SGLang: 1.04 GB with 36 batch sizes
#: (github.com/sgl-project/sglang/pull/12978). For vLLM the larger figure is used, as a bound.
_GRAPH_BYTES = {"vllm": round(1.4 * 2**30), "sglang": 1_040_000_000}
#: On a CPU: measured resident size of a process that passes one row of four tokens through a model of 0.5 million
#: parameters (docs/memory.md has the command). Plugins that were not measured get the largest figure.
_CPU_BYTES = {"fsdp": 490_000_000, "megatron": 550_000_000, "hf": 430_000_000}


@dataclass(frozen=True)
class ProcessMemory:
    """Bytes of a process beyond its tensors.

    Attributes:
        reserve: bytes of context and libraries.
        graphs: bytes of CUDA graphs.
    """

    reserve: int
    graphs: int = 0

    @property
    def total(self) -> int:
        """Sum of reserve and graphs in bytes."""
        return self.reserve + self.graphs


def find_process_memory(
    role: RoleSpec, on_cpu: bool, reserve_bytes: int | None = None, graph_bytes: int | None = None
) -> ProcessMemory:
    """Return the memory of a role's process beyond its tensors.

    Args:
        role: role that the process belongs to.
        on_cpu: True if the devices are CPUs: there are no CUDA graphs, and libraries count as device memory.
        reserve_bytes, graph_bytes: figures to use instead; None for the figures of device and plugin.
    """
    usual = _CPU_BYTES.get(role.plugin, max(_CPU_BYTES.values())) if on_cpu else _GPU_BYTES
    captures = role.rollout is None or role.rollout.captures_graphs
    graphs = 0
    if role.own_process and captures and not on_cpu:
        graphs = _GRAPH_BYTES.get(role.plugin, 0) if graph_bytes is None else graph_bytes
    return ProcessMemory(usual if reserve_bytes is None else reserve_bytes, graphs)
