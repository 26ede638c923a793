"""Schema of the config's ``rollout`` section for ``rollout=vllm``; importable without torch and vLLM."""

from __future__ import annotations

from typing import Annotated, Literal

from rollcast.contracts.config import Gt, Le, Positive, config
from rollcast_serving.engines.schema import AdapterRolloutConfig

__all__ = ["VllmRolloutConfig"]


@config
class VllmRolloutConfig(AdapterRolloutConfig):
    """Keys of the vLLM rollout, beside those of engines with adapters. Names are verl's, else vLLM's."""

    name: str = "vllm"
    """Registry name of the rollout."""
    gpu_memory_utilization: Annotated[float, Gt(0), Le(1)] = 0.5
    """Fraction of the GPU's memory for weights, activations and cache."""
    kv_cache_memory_bytes: Positive | None = None
    """Size of the KV cache in bytes; null for what `gpu_memory_utilization` leaves, and for 256 MiB on a CPU."""
    max_num_seqs: Positive = 256
    """Sequences computed at once, at most."""
    max_num_batched_tokens: Positive | None = None
    """Tokens of one step, at most; null for vLLM's choice."""
    use_request_seeds: bool = True
    """Sample a request that has a seed from a stream of its own, so that nothing beside it matters; on a GPU it costs
    speed."""
    sleep_level: Literal[1, 2] = 1
    """Treatment of released weights: 1 keeps them in host memory, 2 drops them, so that an update has to follow."""
