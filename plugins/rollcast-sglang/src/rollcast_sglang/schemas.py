"""The config's ``rollout`` section when ``rollout=sglang``; importable without torch and SGLang."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rollcast.config.rollout import RolloutConfig

__all__ = ["SglangRolloutConfig"]


@dataclass
class SglangRolloutConfig(RolloutConfig):
    """Keys of the SGLang rollout. Names are verl's where it has one, and SGLang's otherwise.

    Attributes:
        dtype: of weights and activations; ``auto`` is float32 on a CPU, and the model's own on a GPU.
        load_format: how SGLang reads the folder's weights; ``dummy`` starts without them and waits for the
            first update, as does ``auto`` with a folder that has none.
        enforce_eager: run without CUDA graphs.
        attention_backend: SGLang's; empty for its choice, and for ``torch_native`` on a CPU.
        mem_fraction_static: fraction of the GPU's memory for weights and KV cache.
        max_total_tokens: size of the KV cache; empty for what ``mem_fraction_static`` leaves, and for 32768
            on a CPU.
        max_model_len: most positions of a sequence, prompt included; empty for the model's own.
        max_running_requests: most sequences that are computed at once.
        enable_prefix_caching: keep keys and values of prompts, and use them again.
        enable_lora: take adapters apart from the model.
        max_lora_rank: largest rank of an adapter.
        lora_target_modules: modules that adapters may change; ``all`` for all that SGLang knows.
        free_cache_engine: give memory back between the turns of a rollout on the trainer's devices.
        enable_weights_cpu_backup: keep released weights in the host's memory; otherwise they are dropped, so
            that an update has to follow.
        log_level: of SGLang's server.
        health_timeout_s: until the server has to answer when it is asked whether it lives.
        engine_kwargs: anything else of SGLang's ``ServerArgs``, by its name.
    """

    name: str = "sglang"
    dtype: str = "auto"
    load_format: str = "auto"
    enforce_eager: bool = False
    attention_backend: str | None = None
    mem_fraction_static: float = 0.5
    max_total_tokens: int | None = None
    max_model_len: int | None = None
    max_running_requests: int = 256
    enable_prefix_caching: bool = True
    enable_lora: bool = False
    max_lora_rank: int = 16
    lora_target_modules: list[str] = field(default_factory=lambda: ["all"])
    free_cache_engine: bool = True
    enable_weights_cpu_backup: bool = True
    log_level: str = "warning"
    health_timeout_s: float = 60.0
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
