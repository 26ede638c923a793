"""Per-token quantities of the responses: log-probs, entropy, values.

Axes: ``B`` rows, ``P`` prompt and ``T`` response positions, ``V`` vocabulary. The logits at position ``P - 1 + t``
predict response token ``t``.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import torch

from rollcast_engine.images import IMAGE_INPUTS
from rollcast_fsdp.prompts import shared_prompt_logits

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = [
    "at_temperature",
    "keep_logits",
    "response_logits",
    "response_states",
    "response_values",
    "sum_pi_squared",
    "token_entropy",
    "token_log_probs",
]


def token_log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the log-probs ``[..., T]`` of ``tokens``, int64 ``[..., T]``, under ``logits``, float ``[..., T, V]``.

    This uses gather and logsumexp, so that no second ``[..., T, V]`` of log-probs is kept for the backward pass.
    """
    chosen = logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return chosen - torch.logsumexp(logits, dim=-1)


def token_entropy(logits: Tensor) -> Tensor:
    """Return the entropy in nats, ``[...]``, of the distributions ``logits``, float ``[..., V]``."""
    relative = _relative(logits)
    return torch.logsumexp(relative, dim=-1) - (torch.softmax(relative, dim=-1) * relative).sum(-1)


def sum_pi_squared(logits: Tensor) -> Tensor:
    """Return ``Σ_v p_v²``, ``[...]``, of the distributions ``logits``, float ``[..., V]``."""
    relative = _relative(logits)
    return (torch.logsumexp(2 * relative, dim=-1) - 2 * torch.logsumexp(relative, dim=-1)).exp()


def _relative(logits: Tensor) -> Tensor:
    """Return logits relative to the largest, so that no result is a small difference of large numbers."""
    return logits - logits.detach().amax(-1, keepdim=True)


def response_logits(
    module: nn.Module,
    model_inputs: dict[str, Tensor],
    response_length: int,
    temperature: float,
    share_prompts: bool = False,
) -> Tensor:
    """Return the logits that predict the response tokens, divided by the temperature, float32 ``[B, T, V]``.

    Args:
        module: a causal LM.
        model_inputs: ``input_ids``, ``attention_mask`` and ``position_ids``, int64 ``[B, P + T]``.
        response_length: ``T``.
        temperature: sampling temperature, above 0.
        share_prompts: compute each distinct prompt once; see :func:`shared_prompt_logits`.
    """
    logits: Tensor | None = None
    # Prompts with images are not compared.
    if share_prompts and not any(name in model_inputs for name in IMAGE_INPUTS):
        logits = shared_prompt_logits(module, model_inputs, response_length, keep_logits(module, 1))
    if logits is None:
        logits = response_states(module, model_inputs, response_length)[:, -response_length:]
    return at_temperature(logits, temperature)


def at_temperature(logits: Tensor, temperature: float) -> Tensor:
    """Return logits in float32, divided by the temperature; those given are not changed."""
    scaled = logits.float()
    if temperature == 1.0:
        return scaled
    return scaled / temperature if scaled is logits else scaled.div_(temperature)


def response_states(module: nn.Module, model_inputs: dict[str, Tensor], response_length: int) -> Tensor:
    """Return the model's logits; the last ``T`` positions predict the response tokens.

    Only those go through the vocabulary head if the model supports that.
    """
    arguments = keep_logits(module, response_length)
    logits: Tensor = module(**_without_last(model_inputs), use_cache=False, **arguments).logits
    return logits


def response_values(module: nn.Module, model_inputs: dict[str, Tensor], response_length: int) -> Tensor:
    """Return the values of the states before the response tokens, float32 ``[B, T]``."""
    values: Tensor = module(**_without_last(model_inputs))
    return values[:, -response_length:, 0].float()


def keep_logits(module: nn.Module, places: int | Tensor) -> dict[str, int | Tensor]:
    """Return the keyword argument that limits logits to the last ``places`` positions or to the positions ``places``;
    empty if the model does not support it.
    """
    return {"logits_to_keep": places} if "logits_to_keep" in inspect.signature(module.forward).parameters else {}


def _without_last(model_inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    # The last token predicts nothing.
    return {name: column if name in IMAGE_INPUTS else column[..., :-1] for name, column in model_inputs.items()}
