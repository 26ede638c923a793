"""Keys that the ``rollout`` sections of engines share; importable without torch and without an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any, ClassVar, Literal

from rollcast.contracts.config import Gt, Positive, config
from rollcast.contracts.sections import RolloutConfig

__all__ = ["AdapterRolloutConfig", "EngineRolloutConfig"]


@config
class EngineRolloutConfig(RolloutConfig):
    """Keys of a rollout that runs an engine. Names are verl's where verl has one.

    Attributes:
        device_arguments: arguments of the engine that change the number or the choice of its devices → key of rollcast
            that does, empty if rollcast chooses the value itself.
    """

    device_arguments: ClassVar[Mapping[str, str]] = {}

    dtype: Literal["auto", "float32", "float", "bfloat16", "float16", "half"] = "auto"
    """Dtype of weights and activations; `auto` is float32 on a CPU, and the engine's choice on a GPU. If a dtype is
    named, a weight sync casts to it before sending; with `auto` on a GPU it sends the actor's dtype.
    """
    load_format: str = "auto"
    """The engine's format for loading the folder's weights. `dummy` starts without weights and waits for the first
    update, as does `auto` for a folder without weights.
    """
    enforce_eager: bool = False
    """Run without CUDA graphs and compiled graphs; always true on a CPU."""
    max_model_len: Positive | None = None
    """Maximum length of a sequence in tokens, prompt included; null for the model's own limit."""
    enable_prefix_caching: bool = True
    """Cache the keys and values of prompts and reuse them."""
    free_cache_engine: bool = True
    """Release memory between generation phases if the rollout shares devices with the trainer; no effect on a CPU."""
    health_timeout_s: Annotated[float, Gt(0)] = 60.0
    """Timeout of a health check in seconds."""
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the engine, by its own names: vLLM's `AsyncEngineArgs`, SGLang's `ServerArgs`,
    TensorRT-LLM's `TorchLlmArgs`.
    """


@config
class AdapterRolloutConfig(EngineRolloutConfig):
    """Keys of a rollout whose engine supports LoRA adapters."""

    enable_lora: bool = False
    """Load adapters separately from the model."""
    max_lora_rank: Positive = 16
    """Maximum rank of an adapter."""
