"""A run that trains a LoRA adapter: what follows from it for the rollout, and its size."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollcast.errors import ConfigError

if TYPE_CHECKING:
    from rollcast.contracts.engine import ModelConfig

__all__ = ["adapter_rank", "count_adapter", "take_adapters"]

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
    config = _read_config(model.lora_adapter_path)
    return int(config["r"])


def _read_config(folder: str) -> dict[str, Any]:
    file = Path(folder) / "adapter_config.json"
    try:
        config = dict(json.loads(file.read_text(encoding="utf-8")))
        return {"r": int(config["r"]), "target_modules": config.get("target_modules", "all-linear")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"model.lora_adapter_path: {file} cannot be read ({error}); give a folder that PEFT wrote"
        ) from error


def take_adapters(rollout: Any, model: ModelConfig) -> None:
    """Have a rollout take the adapter that the engine trains, if it has to be told to.

    Args:
        rollout: the config's section, which is changed: ``enable_lora`` and ``max_lora_rank``, if it has them.
        model: what trains.
    """
    rank = adapter_rank(model)
    if not model.trains_adapter or not hasattr(rollout, "enable_lora"):
        return
    needed = max(_SMALLEST_RANK, 1 << (rank - 1).bit_length())
    if not rollout.enable_lora or rollout.max_lora_rank < needed:
        rollout.enable_lora, rollout.max_lora_rank = True, max(rollout.max_lora_rank, needed)
        logger.info("model.lora_rank=%d sets rollout.enable_lora=true, max_lora_rank=%d", rank, rollout.max_lora_rank)


def count_adapter(model: ModelConfig) -> int:
    """Numbers in the adapter that ``model`` trains, from the folder's config; 0 if it trains none.

    Raises:
        ConfigError: ``model.lora_adapter_path`` holds no adapter, or no linear layer is chosen.
    """
    if not model.trains_adapter:
        return 0
    import torch
    import transformers
    from torch import nn

    targets = model.target_modules
    if model.lora_adapter_path is not None:
        targets = _read_config(model.lora_adapter_path)["target_modules"]
    config = transformers.AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    auto: Any = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        module = auto.from_config(config, trust_remote_code=model.trust_remote_code)
    head = module.get_output_embeddings()
    sizes = [
        part.in_features + part.out_features
        for name, part in module.named_modules()
        if isinstance(part, nn.Linear) and part is not head and _is_target(name, targets)
    ]
    if not sizes:
        raise ConfigError(f"model.target_modules={targets} names no linear layer of the model in {model.path}")
    return adapter_rank(model) * sum(sizes)


def _is_target(name: str, targets: Any) -> bool:
    """As PEFT chooses: by regular expression, or by the end of the name."""
    if isinstance(targets, str):
        return targets.lower() == "all-linear" or re.fullmatch(targets, name) is not None
    return any(name == target or name.endswith(f".{target}") for target in targets)
