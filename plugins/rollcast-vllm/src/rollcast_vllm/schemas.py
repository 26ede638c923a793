"""The config's ``rollout`` section when ``rollout=vllm``; importable without torch and vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rollcast.config.rollout import RolloutConfig

__all__ = ["VllmRolloutConfig"]


@dataclass
class VllmRolloutConfig(RolloutConfig):
    """Keys of the vLLM rollout. Names are verl's where it has one, and vLLM's otherwise.

    Attributes:
        dtype: of weights and activations; ``auto`` is float32 on a CPU, and vLLM's choice on a GPU.
        load_format: how vLLM reads the folder's weights; ``dummy`` starts without them and waits for the
            first update, as does ``auto`` with a folder that has none.
        enforce_eager: run without compiled graphs; on a CPU always.
        gpu_memory_utilization: fraction of the GPU's memory for weights, activations and cache.
        kv_cache_memory_bytes: size of the KV cache; empty for what ``gpu_memory_utilization`` leaves, and
            for 256 MiB on a CPU.
        max_model_len: most positions of a sequence, prompt included; empty for the model's own.
        max_num_seqs: most sequences that are computed at once.
        max_num_batched_tokens: most tokens of one step; empty for vLLM's choice.
        enable_prefix_caching: keep keys and values of prompts, and use them again.
        use_request_seeds: sample a request that has a seed from a stream of its own, so that nothing beside it
            matters; on a GPU it costs speed.
        enable_lora: take adapters apart from the model.
        max_lora_rank: largest rank of an adapter.
        free_cache_engine: give memory back between the turns of a rollout on the trainer's devices.
        sleep_level: what happens to released weights: 1 keeps them in the host's memory, 2 drops them, so
            that an update has to follow.
        health_timeout_s: until an engine has to answer when it is asked whether it lives.
        engine_kwargs: anything else of vLLM's ``AsyncEngineArgs``, by its name.
    """

    name: str = "vllm"
    dtype: str = "auto"
    load_format: str = "auto"
    enforce_eager: bool = False
    gpu_memory_utilization: float = 0.5
    kv_cache_memory_bytes: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    enable_prefix_caching: bool = True
    use_request_seeds: bool = True
    enable_lora: bool = False
    max_lora_rank: int = 16
    free_cache_engine: bool = True
    sleep_level: int = 1
    health_timeout_s: float = 60.0
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
