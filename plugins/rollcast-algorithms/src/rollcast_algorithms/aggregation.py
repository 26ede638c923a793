"""Loss aggregations, which reduce per-token losses to a micro-batch's share of the mini-batch's loss.

All divide by :class:`~rollcast.contracts.algorithm.Denominators`, which are counts over the whole mini-batch, so the
shares of micro-batches and ranks add up to exactly the loss of the whole mini-batch. With ``l_it`` the losses under the
mask, ``N`` the number of tokens, ``S`` the number of sequences, ``M`` the longest allowed response and ``n_i`` the
number of tokens of row i's sequence:

========================= =============================
token-mean                Σ l_it / N
token-sum                 Σ l_it
seq-mean-token-sum        Σ l_it / S
seq-mean-token-sum-norm   Σ l_it / (S · M)
seq-mean-token-mean       Σ_i (Σ_t l_it / n_i) / S
========================= =============================

A sequence is a row, or all rows of a rollout with several trajectories. In the latter case, the column
``sequence_tokens`` contains ``n_i``, which cannot be computed from the rows of a micro-batch.

Every function takes ``losses`` and ``mask`` ``[B, T]`` and returns a scalar, float32 or wider. A row without tokens
contributes 0, the result is 0 if a denominator is 0, and mismatched shapes raise ValueError.
The names are verl's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from torch import Tensor

from rollcast.contracts.algorithm import Denominators, LossAggregation, describe_function
from rollcast.contracts.engine import LossInputs
from rollcast.errors import PluginTypeError
from rollcast_algorithms._masking import masked

__all__ = [
    "aggregate",
    "SEQUENCE_TOKENS",
    "read_denominators",
    "seq_mean_token_mean",
    "seq_mean_token_sum",
    "seq_mean_token_sum_norm",
    "token_mean",
    "token_sum",
]

SEQUENCE_TOKENS: Final = "sequence_tokens"
"""Column of :attr:`Denominators.sequence_tokens`, int64 ``[B]``; only in batches with rollouts of several rows."""


def read_denominators(inputs: LossInputs) -> Denominators:
    """Return the mini-batch's denominators, with this micro-batch's column ``sequence_tokens`` if there is one."""
    return replace(inputs.denominators, sequence_tokens=inputs.columns.get(SEQUENCE_TOKENS))


def token_mean(losses: Tensor, mask: Tensor, denominators: Denominators) -> Tensor:
    """Return the mean over all tokens, ``Σ l_it / N``, in which long responses weigh more (DAPO, arXiv:2503.14476)."""
    return _share(masked("losses", losses, mask).sum(), denominators.tokens)


def token_sum(losses: Tensor, mask: Tensor, denominators: Denominators) -> Tensor:  # noqa: ARG001
    """Return the sum over all tokens, ``Σ l_it``; the denominators are not used."""
    return masked("losses", losses, mask).sum()


def seq_mean_token_sum(losses: Tensor, mask: Tensor, denominators: Denominators) -> Tensor:
    """Return the mean over sequences of their token sums, ``Σ l_it / S``."""
    return _share(masked("losses", losses, mask).sum(), denominators.sequences)


def seq_mean_token_sum_norm(losses: Tensor, mask: Tensor, denominators: Denominators) -> Tensor:
    """Return the mean over sequences of sums over a constant, ``Σ l_it / (S · M)`` (Dr. GRPO, arXiv:2503.20783)."""
    return _share(masked("losses", losses, mask).sum(), denominators.sequences * denominators.max_tokens)


def seq_mean_token_mean(losses: Tensor, mask: Tensor, denominators: Denominators) -> Tensor:
    """Return the mean over sequences of their token means, ``Σ_i (Σ_t l_it / n_i) / S`` (GRPO, arXiv:2402.03300)."""
    own = denominators.sequence_tokens
    if own is not None and own.shape != mask.shape[:1]:
        raise ValueError(f"sequence_tokens is {list(own.shape)}, but there are {len(mask)} rows")
    tokens = (mask != 0).sum(-1) if own is None else own.to(mask.device)
    return _share((masked("losses", losses, mask).sum(-1) / tokens.clamp(min=1)).sum(), denominators.sequences)


def _share(total: Tensor, denominator: float) -> Tensor:
    # The product keeps the graph, so that backward works even for an empty share.
    return total / denominator if denominator > 0 else total * 0.0


def aggregate(aggregation: LossAggregation, losses: Tensor, mask: Tensor, counts: Denominators) -> Tensor:
    """Return the number that an aggregation makes of losses ``[B, T]``.

    Raises:
        PluginTypeError: it returns something else than a float tensor ``[]``, or loses the gradient of the losses.
    """
    loss: Any = aggregation(losses, mask, counts)
    if getattr(loss, "shape", None) != () or not loss.is_floating_point():
        what = f"{loss.dtype} {list(loss.shape)}" if hasattr(loss, "dtype") else f"a {type(loss).__name__}"
        raise PluginTypeError(
            f"{describe_function(aggregation)} returned {what}; it has to be one number, a float tensor []"
        )
    if losses.requires_grad and not loss.requires_grad:
        raise PluginTypeError(
            f"{describe_function(aggregation)} returned a number without a gradient, so that nothing would be trained"
        )
    checked: Tensor = loss
    return checked
