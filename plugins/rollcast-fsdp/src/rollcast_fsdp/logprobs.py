"""Per-token quantities of the responses: log-probs, entropy, values.

Axes: ``B`` rows, ``P`` prompt and ``T`` response positions, ``V`` vocabulary. The logits at
position ``P - 1 + t`` predict response token ``t``.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["response_logits", "response_values", "token_entropy", "token_log_probs"]


def token_log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-probs of ``tokens`` int64 ``[B, T]`` under ``logits`` float ``[B, T, V]``, as ``[B, T]``.

    By gather and logsumexp, so that no second ``[B, T, V]`` of log-probs is kept for the backward.
    """
    chosen = logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return chosen - torch.logsumexp(logits, dim=-1)


def token_entropy(logits: Tensor) -> Tensor:
    """Entropy in nats of the distributions ``logits`` float ``[B, T, V]``, as ``[B, T]``."""
    mean_logit = (torch.softmax(logits, dim=-1) * logits).sum(-1)
    return torch.logsumexp(logits, dim=-1) - mean_logit


def response_logits(
    module: nn.Module, model_inputs: dict[str, Tensor], response_length: int, temperature: float
) -> Tensor:
    """Logits that predict the response tokens, divided by the temperature, float32 ``[B, T, V]``.

    Only ``T`` positions go through the vocabulary head where the model lets us ask.
    """
    extra = {"logits_to_keep": response_length} if _keeps_logits(module) else {}
    logits: Tensor = module(**_without_last(model_inputs), use_cache=False, **extra).logits
    logits = logits[:, -response_length:].float()
    return logits if temperature == 1.0 else logits / temperature


def response_values(module: nn.Module, model_inputs: dict[str, Tensor], response_length: int) -> Tensor:
    """Values of the states in which the response tokens were chosen, float32 ``[B, T]``."""
    values: Tensor = module(**_without_last(model_inputs))
    return values[:, -response_length:, 0].float()


def _without_last(model_inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    # Nothing is predicted from the last token.
    return {name: column[:, :-1] for name, column in model_inputs.items()}


def _keeps_logits(module: nn.Module) -> bool:
    return "logits_to_keep" in inspect.signature(module.forward).parameters
