"""One micro-batch: from its tokens to per-token quantities, and from those to its share of the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from rollcast.contracts.engine import ForwardSettings
from rollcast_engine.batching import dummy_micro_batch
from rollcast_engine.hf import ValueModel
from rollcast_engine.loss import loss_share, zero_loss
from rollcast_fsdp.logprobs import response_logits, response_values, sum_pi_squared, token_entropy, token_log_probs

if TYPE_CHECKING:
    from torch import Tensor, nn

    from rollcast.contracts.algorithm import Denominators
    from rollcast.contracts.engine import LossFunction
    from rollcast_engine.batching import MicroBatch
    from rollcast_engine.reduce import MetricSums

__all__ = ["VocabularyKl", "dummy_loss", "quantity_names", "run_micro_batch"]

#: From a micro-batch and the policy's logits ``[b, t, V]`` to the KL penalty at each position, ``[b, t]``.
VocabularyKl = Callable[["MicroBatch", "Tensor"], "Tensor"]


def quantity_names(module: nn.Module, settings: ForwardSettings) -> list[str]:
    """What a forward gives under these settings."""
    if isinstance(module, ValueModel):
        return ["values"]
    asked = {
        "entropy": settings.calculate_entropy,
        "sum_pi_squared": settings.calculate_sum_pi_squared,
        "vocabulary_kl": settings.vocabulary_kl is not None,
    }
    return ["log_probs", *(name for name, wanted in asked.items() if wanted)]


def run_micro_batch(
    module: nn.Module,
    micro: MicroBatch,
    denominators: Denominators,
    loss_function: LossFunction | None,
    settings: ForwardSettings,
    sums: MetricSums,
    share_prompts: bool = False,
    vocabulary_kl: VocabularyKl | None = None,
) -> tuple[dict[str, Tensor], Tensor | None]:
    """Per-token quantities ``[b, t]`` of the micro-batch, and its share of the loss if one is asked for.

    A dummy's loss is zero, but hangs on the model's output: its backward meets the other ranks'.

    Args:
        share_prompts: for a model that is not sharded; ranks that share one run the same passes.
        vocabulary_kl: gives the quantity of that name.
    """
    given = _forward(module, micro, settings, share_prompts, vocabulary_kl)
    if loss_function is None:
        return given, None
    return given, loss_share(given, micro, denominators, loss_function, sums)


def dummy_loss(module: nn.Module, device: torch.device) -> Tensor:
    """The zero loss of a dummy micro-batch; its backward takes part in the ranks' reduction."""
    return zero_loss(_forward(module, dummy_micro_batch(device), ForwardSettings(), share_prompts=False))


def _forward(
    module: nn.Module,
    micro: MicroBatch,
    settings: ForwardSettings,
    share_prompts: bool,
    vocabulary_kl: VocabularyKl | None = None,
) -> dict[str, Tensor]:
    length = micro.responses.size(1)
    chosen = micro.response_mask > 0
    if isinstance(module, ValueModel):
        return {"values": response_values(module, micro.model_inputs, length).where(chosen, 0.0)}
    logits = response_logits(module, micro.model_inputs, length, settings.temperature, share_prompts)
    given = {"log_probs": token_log_probs(logits, micro.responses).where(chosen, 0.0)}
    if settings.calculate_entropy:
        given["entropy"] = token_entropy(logits).where(chosen, 0.0)
    if settings.calculate_sum_pi_squared:
        given["sum_pi_squared"] = sum_pi_squared(logits).where(chosen, 0.0)
    if vocabulary_kl is not None:
        given["vocabulary_kl"] = vocabulary_kl(micro, logits).where(chosen, 0.0)
    return given
