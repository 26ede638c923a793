"""LoRA adapters: the rank that a run trains, and the rollout keys that follow from it."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollcast.errors import ConfigError

if TYPE_CHECKING:
    from rollcast.contracts.engine import ModelConfig

__all__ = ["adapter_rank", "read_adapter_config", "take_adapters"]

logger = logging.getLogger(__name__)
#: Engines have kernels for powers of two from here on.
_SMALLEST_RANK = 8


def adapter_rank(model: ModelConfig) -> int:
    """The rank of the adapter that ``model`` trains; 0 if it trains none.

    Raises:
        ConfigError: ``model.lora_adapter_path`` holds no adapter.
    """
    if model.lora_adapter_path is None:
        return model.lora_rank
    config = read_adapter_config(model.lora_adapter_path)
    return int(config["r"])


def read_adapter_config(folder: str) -> dict[str, Any]:
    """Return ``r`` and ``target_modules`` of the adapter in ``folder``.

    Raises:
        ConfigError: the folder holds no adapter.
    """
    file = Path(folder) / "adapter_config.json"
    try:
        config = dict(json.loads(file.read_text(encoding="utf-8")))
        return {"r": int(config["r"]), "target_modules": config.get("target_modules", "all-linear")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"model.lora_adapter_path: {file} cannot be read ({error}); give a folder that PEFT wrote"
        ) from error


def take_adapters(rollout: Any, model: ModelConfig) -> Any:
    """Return a rollout's section that takes the adapter which the engine trains.

    Args:
        rollout: The config's section; only one with ``enable_lora`` and ``max_lora_rank`` has to change.
        model: The model in training.
    """
    rank = adapter_rank(model)
    if not model.trains_adapter or not hasattr(rollout, "enable_lora"):
        return rollout
    needed = max(_SMALLEST_RANK, 1 << (rank - 1).bit_length())
    if rollout.enable_lora and rollout.max_lora_rank >= needed:
        return rollout
    most = max(rollout.max_lora_rank, needed)
    logger.info("model.lora_rank=%d sets rollout.enable_lora=true, max_lora_rank=%d", rank, most)
    return replace(rollout, enable_lora=True, max_lora_rank=most)
