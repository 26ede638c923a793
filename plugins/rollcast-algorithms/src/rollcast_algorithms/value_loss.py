"""The critic's loss: the squared error against the returns, with PPO's clip."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rollcast.contracts.algorithm import LossAggregation, PolicyLossOutput
from rollcast.contracts.engine import LossInputs, LossOutput
from rollcast.errors import ColumnError
from rollcast_algorithms._masking import masked
from rollcast_algorithms.aggregation import aggregate, read_denominators, token_mean

__all__ = ["ValueLoss", "clipped_value_loss"]


def clipped_value_loss(
    predictions: Tensor, values: Tensor, returns: Tensor, response_mask: Tensor, cliprange_value: float
) -> PolicyLossOutput:
    """Compute the critic's loss, the larger of the squared errors of the prediction and of the clipped prediction.

    With ``V`` the prediction and ``V_old`` the critic's value when the batch was made::

        L = max((V - R)², (clamp(V, V_old - c, V_old + c) - R)²) / 2

    Metric: ``vf_clipfrac`` (the clipped error was larger).

    Source: Schulman et al. 2017, arXiv:1707.06347, as in OpenAI's baselines; the factor 1/2 is verl's.

    Args:
        predictions: predicted values, ``[B, T]``, with gradient.
        values, returns, response_mask: old values, returns and mask, ``[B, T]``.
        cliprange_value: largest change c of the value.

    Returns:
        Losses and metric, float32 or wider ``[B, T]``, zero where the mask is zero.

    Raises:
        ValueError: ``cliprange_value`` is not above 0, or the shapes differ.
    """
    if not cliprange_value > 0:
        raise ValueError(f"cliprange_value must be greater than 0, got {cliprange_value}")
    new = masked("the critic's values", predictions, response_mask)
    old = masked("values", values, response_mask)
    target = masked("returns", returns, response_mask)
    error = (new - target).square()
    near = (torch.maximum(torch.minimum(new, old + cliprange_value), old - cliprange_value) - target).square()
    return PolicyLossOutput(0.5 * torch.maximum(error, near), {"vf_clipfrac": (near > error).to(error.dtype)})


@dataclass(frozen=True)
class ValueLoss:
    """The loss function of a critic's engine; see :func:`clipped_value_loss`.

    Reads the columns ``values`` and ``returns``, and ``sequence_tokens`` if rollouts have several
    rows. Metrics: ``critic/vf_loss``, and means over the
    mini-batch's tokens: ``critic/vf_clipfrac``, ``critic/vpred_mean``.

    Attributes:
        aggregation: aggregation from the registry (``critic.loss_agg_mode``).
        cliprange_value: largest change of a prediction from the old value.

    Raises:
        ValueError: when called, the engine returned no values, or the shapes do not match.
        ColumnError: when called, the batch lacks a column.
    """

    aggregation: LossAggregation = token_mean
    cliprange_value: float = 0.5

    def __call__(self, inputs: LossInputs) -> LossOutput:
        if inputs.values is None:
            raise ValueError("the value loss needs values, which a language model does not give")
        missing = [name for name in ("values", "returns") if name not in inputs.columns]
        if missing:
            present = ", ".join(sorted(inputs.columns)) or "none"
            raise ColumnError(f"the value loss needs the column {missing[0]!r}; the batch has: {present}")
        mask, counts = inputs.response_mask, read_denominators(inputs)
        values, returns = inputs.columns["values"], inputs.columns["returns"]
        out = clipped_value_loss(inputs.values, values, returns, mask, self.cliprange_value)
        loss = aggregate(self.aggregation, out.losses, mask, counts)
        present_counts = counts if counts.present_tokens is None else replace(counts, tokens=counts.present_tokens)
        means = {**out.metrics, "vpred_mean": inputs.values.detach()}
        metrics = {f"critic/{name}": token_mean(column, mask, present_counts) for name, column in means.items()}
        return LossOutput(loss, {"critic/vf_loss": loss.detach(), **metrics})
