"""Schema of the config's ``rollout`` section for ``rollout=sglang``; importable without torch and SGLang."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any, Literal

from rollcast.contracts.config import Gt, Le, Positive, config
from rollcast.contracts.sections import RolloutConfig

__all__ = ["SglangRolloutConfig"]


@config
class SglangRolloutConfig(RolloutConfig):
    """Keys of the SGLang rollout. Names are verl's where it has one, and SGLang's otherwise."""

    name: str = "sglang"
    """Registry name of the rollout."""
    dtype: Literal["auto", "float32", "float", "bfloat16", "float16", "half"] = "auto"
    """Dtype of weights and activations; `auto` is float32 on a CPU, and SGLang's choice on a GPU.
    A weight sync casts to a dtype that is named before it sends; with `auto` on a GPU it sends the actor's."""
    load_format: str = "auto"
    """SGLang's way to read the folder's weights. `dummy` starts without them and waits for the first update, as does
    `auto` with a folder that has none."""
    enforce_eager: bool = False
    """Run without CUDA graphs."""
    attention_backend: str | None = None
    """SGLang's attention backend; null for its choice, and for `torch_native` on a CPU."""
    mem_fraction_static: Annotated[float, Gt(0), Le(1)] = 0.5
    """Fraction of the GPU's memory for weights and KV cache."""
    max_total_tokens: Positive | None = None
    """Size of the KV cache in tokens; null for what `mem_fraction_static` leaves, and for 32768 on a CPU."""
    max_model_len: Positive | None = None
    """Longest sequence in tokens, prompt included; null for the model's own."""
    max_running_requests: Positive = 256
    """Sequences computed at once, at most."""
    enable_prefix_caching: bool = True
    """Keep the keys and values of prompts and use them again."""
    enable_lora: bool = False
    """Take adapters apart from the model."""
    max_lora_rank: Positive = 16
    """Largest rank of an adapter."""
    lora_target_modules: list[str] = field(default_factory=lambda: ["all"])
    """Modules that adapters may change; `all` for all that SGLang knows."""
    free_cache_engine: bool = True
    """Release memory between the turns of a rollout on the trainer's devices; without effect on a CPU."""
    enable_weights_cpu_backup: bool = True
    """Keep released weights in host memory; otherwise they are dropped, so that an update has to follow."""
    log_level: str = "warning"
    """Log level of SGLang's server."""
    health_timeout_s: Annotated[float, Gt(0)] = 60.0
    """Timeout of the server's answer to a health check in seconds."""
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of SGLang's `ServerArgs`, by name."""
