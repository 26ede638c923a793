"""Computing a micro-batch's share of the loss from per-token quantities."""

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
    """Return the names of the outputs of a batch."""
    if is_value_model:
        return ["values"]
    asked = {
        "entropy": settings.calculate_entropy,
        "sum_pi_squared": settings.calculate_sum_pi_squared,
        "vocabulary_kl": settings.vocabulary_kl is not None,
    }
    return ["log_probs", *(name for name, wanted in asked.items() if wanted)]


def loss_share(
    quantities: Mapping[str, Tensor],
    micro: MicroBatch,
    denominators: Denominators,
    loss_function: LossFunction,
    sums: MetricSums,
) -> Tensor:
    """Return the loss function's share for this micro-batch, a scalar, and add its metrics to ``sums``.

    The share of a dummy is zero, but depends on the model's output, so that its backward pass takes part in the
    collectives.

    Args:
        quantities: ``log_probs`` and other requested quantities, or ``values``, each ``[b, t]``.
        micro: the micro-batch.
        denominators: counts that losses divide by.
        loss_function: loss to evaluate.
        sums: accumulator of the metrics.
    """
    if micro.is_dummy:
        return zero_loss(quantities)
    inputs = LossInputs(
        log_probs=quantities.get("log_probs"),
        entropy=quantities.get("entropy"),
        values=quantities.get("values"),
        response_mask=micro.response_mask,
        columns=micro.columns,
        denominators=denominators,
        vocabulary_kl=quantities.get("vocabulary_kl"),
    )
    output = loss_function(inputs)
    sums.add(output.metrics, output.maxima)
    loss = output.loss
    if torch.is_grad_enabled() and not loss.requires_grad:
        loss = loss + zero_loss(quantities)
    return loss


def zero_loss(quantities: Mapping[str, Tensor]) -> Tensor:
    """Return zero with a zero gradient for everything that the quantities depend on."""
    return torch.stack([quantity.sum() for quantity in quantities.values()]).sum() * 0.0
