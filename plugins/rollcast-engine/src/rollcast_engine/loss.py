"""From a micro-batch's per-token quantities to its share of the loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rollcast.contracts.engine import LossInputs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from rollcast.contracts.algorithm import Denominators
    from rollcast.contracts.engine import ForwardSettings, LossFunction
    from rollcast_engine.batching import MicroBatch
    from rollcast_engine.reduce import MetricSums

__all__ = ["loss_share", "quantity_names", "zero_loss"]


def quantity_names(settings: ForwardSettings, is_value_model: bool) -> list[str]:
    """What a batch's output holds."""
    if is_value_model:
        return ["values"]
    asked = {
        "entropy": settings.calculate_entropy,
        "sum_pi_squared": settings.calculate_sum_pi_squared,
        "vocabulary_kl": settings.vocabulary_kl is not None,
    }
    return ["log_probs", *(name for name, wanted in asked.items() if wanted)]


def loss_share(
    given: Mapping[str, Tensor],
    micro: MicroBatch,
    denominators: Denominators,
    loss_function: LossFunction,
    sums: MetricSums,
) -> Tensor:
    """The loss function's share for this micro-batch, a scalar; its metrics are counted in.

    A dummy's share is zero, but hangs on the model's output: its backward meets the other ranks'.

    Args:
        given: ``log_probs`` and what else was asked for, or ``values``, each ``[b, t]``.
        sums: takes the metrics.
    """
    if micro.is_dummy:
        return zero_loss(given)
    inputs = LossInputs(
        log_probs=given.get("log_probs"),
        entropy=given.get("entropy"),
        values=given.get("values"),
        response_mask=micro.response_mask,
        columns=micro.columns,
        denominators=denominators,
        vocabulary_kl=given.get("vocabulary_kl"),
    )
    output = loss_function(inputs)
    sums.add(output.metrics, output.maxima)
    loss = output.loss
    if torch.is_grad_enabled() and not loss.requires_grad:
        loss = loss + zero_loss(given)
    return loss


def zero_loss(given: Mapping[str, Tensor]) -> Tensor:
    """Zero, with a gradient of zeros for all that the quantities came from."""
    return torch.stack([quantity.sum() for quantity in given.values()]).sum() * 0.0
