"""LoRA adapters: the rank of the trained adapter, and the rollout keys derived from it."""

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
#: Smallest rank that engines have kernels for; larger ones are powers of two.
_SMALLEST_RANK = 8


def adapter_rank(model: ModelConfig) -> int:
    """Return the rank of the adapter that ``model`` trains; 0 if it trains none.

    Raises:
        ConfigError: ``model.lora_adapter_path`` contains no adapter.
    """
    if model.lora_adapter_path is None:
        return model.lora_rank
    config = read_adapter_config(model.lora_adapter_path)
    return int(config["r"])


def read_adapter_config(folder: str) -> dict[str, Any]:
    """Return ``r`` and ``target_modules`` of the adapter in ``folder``.

    Raises:
        ConfigError: the folder contains no adapter.
    """
    file = Path(folder) / "adapter_config.json"
    try:
        config = dict(json.loads(file.read_text(encoding="utf-8")))
        return {"r": int(config["r"]), "target_modules": config.get("target_modules", "all-linear")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"model.lora_adapter_path: {file} cannot be read ({error}); set it to a folder that PEFT wrote"
        ) from error


def take_adapters(rollout: Any, model: ModelConfig) -> Any:
    """Return the ``rollout`` section, changed so that the rollout accepts the adapter that the engine trains.

    Args:
        rollout: config section; changed only if it has ``enable_lora`` and ``max_lora_rank``.
        model: the model in training.
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
