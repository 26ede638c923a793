"""Schema of the config's ``rollout`` section for ``rollout=vllm``; importable without torch and vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from rollcast.contracts.config import Gt, Le, Positive, config
from rollcast_serving.engines.schema import AdapterRolloutConfig

__all__ = ["VllmRolloutConfig"]


@config
class VllmRolloutConfig(AdapterRolloutConfig):
    """Keys of the vLLM rollout, in addition to those of engines with adapters. Names are verl's, otherwise vLLM's."""

    device_arguments: ClassVar[Mapping[str, str]] = {
        "tensor_parallel_size": "tensor_model_parallel_size",
        "pipeline_parallel_size": "pipeline_model_parallel_size",
        "data_parallel_size": "data_parallel_size",
        "enable_expert_parallel": "expert_parallel_size",
        **dict.fromkeys(
            [
                *("nnodes", "node_rank", "master_addr", "master_port", "distributed_executor_backend", "device_ids"),
                *("data_parallel_rank", "data_parallel_start_rank", "data_parallel_size_local"),
                *("data_parallel_address", "data_parallel_rpc_port", "data_parallel_backend"),
                *("data_parallel_hybrid_lb", "data_parallel_external_lb", "data_parallel_multi_port_external_lb"),
                *("prefill_context_parallel_size", "enable_elastic_ep", "elastic_ep_max_dp_size"),
            ],
            "",
        ),
    }
    name: str = "vllm"
    """Registry name of the rollout."""
    gpu_memory_utilization: Annotated[float, Gt(0), Le(1)] = 0.5
    """Fraction of the GPU's memory for weights, activations and cache."""
    kv_cache_memory_bytes: Positive | None = None
    """Size of the KV cache in bytes; null for the memory that `gpu_memory_utilization` leaves, or on a CPU for 256 MiB
    or, if that is more, one sequence of the greatest length."""
    max_num_seqs: Positive = 256
    """Maximum number of sequences computed at once."""
    max_num_batched_tokens: Positive | None = None
    """Maximum number of tokens per step; null for vLLM's choice."""
    use_request_seeds: bool = True
    """Sample a request that has a seed from its own random stream, independent of other requests; slower on a GPU."""
    sleep_level: Literal[1, 2] = 1
    """Handling of released weights: 1 keeps them in host memory, 2 drops them, so that an update must follow."""
