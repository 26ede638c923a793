"""Building a whole model in memory from gathered weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from rollcast.contracts.weights import checkpoint_tensors
from rollcast.errors import CapabilityError
from rollcast_engine.hf import load_hf_config
from rollcast_engine.rng import kept_rng

if TYPE_CHECKING:
    from torch import Tensor, nn

    from rollcast.contracts.engine import ModelConfig

__all__ = ["whole_module"]


def whole_module(model: ModelConfig, tensors: Iterable[tuple[str, Tensor]], device: torch.device) -> nn.Module:
    """Return the causal LM of transformers with these weights, in eval mode on ``device``.

    Raises:
        CapabilityError: the weights do not belong to a causal LM but, for example, to a value model.
    """
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    module: Any = None
    parameters: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if module is None:
            options = {"dtype": tensor.dtype, "attn_implementation": model.attn_implementation}
            with kept_rng(), torch.device(device):
                module = auto.from_config(load_hf_config(model), trust_remote_code=model.trust_remote_code, **options)
            parameters = checkpoint_tensors(module, dict(module.named_parameters()))
        if name not in parameters:
            raise CapabilityError(f"{type(module).__name__} has no {name}: a value model cannot generate")
        with torch.no_grad():
            parameters[name].copy_(tensor)
    whole: nn.Module = module.eval().requires_grad_(False)
    return whole
