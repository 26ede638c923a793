"""Schema of the config's ``rollout`` section for ``rollout=vllm``; importable without torch and vLLM."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any, Literal

from rollcast.contracts.config import Gt, Le, Positive, config
from rollcast.contracts.sections import RolloutConfig

__all__ = ["VllmRolloutConfig"]


@config
class VllmRolloutConfig(RolloutConfig):
    """Keys of the vLLM rollout. Names are verl's where it has one, and vLLM's otherwise."""

    name: str = "vllm"
    """Registry name of the rollout."""
    dtype: Literal["auto", "float32", "float", "bfloat16", "float16", "half"] = "auto"
    """Dtype of weights and activations; `auto` is float32 on a CPU, and vLLM's choice on a GPU.
    A weight sync casts to a dtype that is named before it sends; with `auto` on a GPU it sends the actor's."""
    load_format: str = "auto"
    """vLLM's way to read the folder's weights. `dummy` starts without them and waits for the first update, as does
    `auto` with a folder that has none."""
    enforce_eager: bool = False
    """Run without compiled graphs; on a CPU always."""
    gpu_memory_utilization: Annotated[float, Gt(0), Le(1)] = 0.5
    """Fraction of the GPU's memory for weights, activations and cache."""
    kv_cache_memory_bytes: Positive | None = None
    """Size of the KV cache in bytes; null for what `gpu_memory_utilization` leaves, and for 256 MiB on a CPU."""
    max_model_len: Positive | None = None
    """Longest sequence in tokens, prompt included; null for the model's own."""
    max_num_seqs: Positive = 256
    """Sequences computed at once, at most."""
    max_num_batched_tokens: Positive | None = None
    """Tokens of one step, at most; null for vLLM's choice."""
    enable_prefix_caching: bool = True
    """Keep the keys and values of prompts and use them again."""
    use_request_seeds: bool = True
    """Sample a request that has a seed from a stream of its own, so that nothing beside it matters; on a GPU it costs
    speed."""
    enable_lora: bool = False
    """Take adapters apart from the model."""
    max_lora_rank: Positive = 16
    """Largest rank of an adapter."""
    free_cache_engine: bool = True
    """Release memory between the turns of a rollout on the trainer's devices; without effect on a CPU."""
    sleep_level: Literal[1, 2] = 1
    """Treatment of released weights: 1 keeps them in host memory, 2 drops them, so that an update has to follow."""
    health_timeout_s: Annotated[float, Gt(0)] = 60.0
    """Timeout of an engine's answer to a health check in seconds."""
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's `AsyncEngineArgs`, by name."""
