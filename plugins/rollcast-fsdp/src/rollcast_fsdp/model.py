"""Loading a Hugging Face folder as the module that the engine trains."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from rollcast.errors import ConfigError
from rollcast_engine.hf import WEIGHT_PATTERNS, ValueModel, load_hf_config

if TYPE_CHECKING:
    from torch import nn

    from rollcast.contracts.engine import EngineSetup, ModelConfig

__all__ = ["build_module", "enable_checkpointing"]

log = logging.getLogger(__name__)


def build_module(setup: EngineSetup, dtype: torch.dtype) -> nn.Module:
    """The whole model in host memory, the same on every rank; the caller's RNG is left as it was.

    Raises:
        ConfigError: the folder is missing or incomplete, or its architecture is no causal LM.
    """
    config = load_hf_config(setup.model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(setup.seed)
        if setup.model_type == "language_model":
            return _load(setup.model, config, dtype, "AutoModelForCausalLM")
        module = ValueModel(_load(setup.model, config, dtype, "AutoModel")).to(dtype)
        if not setup.model.random_init:
            _load_value_head(module, Path(setup.model.path))
        return module


def enable_checkpointing(module: nn.Module) -> None:
    """Have the layers recompute their activations in the backward pass."""
    body: Any = module.body if isinstance(module, ValueModel) else module
    options = {"use_reentrant": False}
    if hasattr(body, "activation_checkpointing_enable"):  # the name in newer versions of transformers
        body.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:
        body.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def _load(model: ModelConfig, config: Any, dtype: torch.dtype, auto_class: str) -> nn.Module:
    import transformers

    auto = getattr(transformers, auto_class)
    options: dict[str, Any] = {
        "dtype": dtype,
        "attn_implementation": model.attn_implementation,
        "trust_remote_code": model.trust_remote_code,
    }
    folder = Path(model.path)
    if not model.random_init and not any(any(folder.glob(pattern)) for pattern in WEIGHT_PATTERNS):
        raise ConfigError(
            f"model.path {folder} holds no weights (*.safetensors or pytorch_model*.bin); "
            "set model.random_init=true to start from random ones"
        )
    try:
        if model.random_init:
            module: nn.Module = auto.from_config(config, **options)
            return module
        module, info = auto.from_pretrained(folder, config=config, output_loading_info=True, **options)
    except (ValueError, KeyError, OSError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"model.path {folder} does not load with {auto_class}: {error}") from error
    missing = sorted(info["missing_keys"])
    if missing:
        # transformers would go on with random numbers in their place.
        raise ConfigError(f"the weights in {folder} lack {len(missing)} parameters, such as {', '.join(missing[:3])}")
    return module


def _load_value_head(module: ValueModel, folder: Path) -> None:
    """Take ``score.*`` from the folder if it is an exported value model; else it stays zero."""
    from safetensors import safe_open

    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            if "score.weight" not in tensors.keys():  # noqa: SIM118  # it is no mapping
                continue
            weight = tensors.get_tensor("score.weight")
            # Heads of ...ForSequenceClassification have no bias.
            bias = tensors.get_tensor("score.bias") if "score.bias" in tensors.keys() else weight.new_zeros(1)  # noqa: SIM118
            head = {"weight": weight, "bias": bias}
        if head["weight"].shape == module.score.weight.shape:
            module.score.load_state_dict(head)
            log.info("value head read from %s", file)
        return
