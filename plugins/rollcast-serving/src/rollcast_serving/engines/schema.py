"""Keys that the ``rollout`` sections of engines share; importable without torch and without an engine."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any, Literal

from rollcast.contracts.config import Gt, Positive, config
from rollcast.contracts.sections import RolloutConfig

__all__ = ["AdapterRolloutConfig", "EngineRolloutConfig"]


@config
class EngineRolloutConfig(RolloutConfig):
    """Keys of a rollout that runs an engine. Names are verl's where it has one."""

    dtype: Literal["auto", "float32", "float", "bfloat16", "float16", "half"] = "auto"
    """Dtype of weights and activations; `auto` is float32 on a CPU, and the engine's choice on a GPU.
    A weight sync casts to a dtype that is named before it sends; with `auto` on a GPU it sends the actor's."""
    load_format: str = "auto"
    """The engine's way to read the folder's weights. `dummy` starts without them and waits for the first update, as
    does `auto` with a folder that has none."""
    enforce_eager: bool = False
    """Run without CUDA graphs and compiled graphs; on a CPU always."""
    max_model_len: Positive | None = None
    """Longest sequence in tokens, prompt included; null for the model's own."""
    enable_prefix_caching: bool = True
    """Keep the keys and values of prompts and use them again."""
    free_cache_engine: bool = True
    """Release memory between the turns of a rollout on the trainer's devices; without effect on a CPU."""
    health_timeout_s: Annotated[float, Gt(0)] = 60.0
    """Timeout of the engine's answer to a health check in seconds."""
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the engine, by its own names: vLLM's `AsyncEngineArgs`, SGLang's `ServerArgs`,
    TensorRT-LLM's `TorchLlmArgs`."""


@config
class AdapterRolloutConfig(EngineRolloutConfig):
    """Keys of a rollout whose engine takes LoRA adapters."""

    enable_lora: bool = False
    """Take adapters apart from the model."""
    max_lora_rank: Positive = 16
    """Largest rank of an adapter."""
