"""Loss aggregations: from per-token losses to a micro-batch's share of the mini-batch's loss.

All divide by :class:`~rollcast.contracts.algorithm.Denominators`, which count the whole
mini-batch, and so the shares of its micro-batches and ranks add up to exactly the loss of the
mini-batch in one piece. With ``l_it`` the losses under the mask, ``N`` the tokens, ``S`` the
sequences, ``M`` the longest allowed response and ``n_i`` the tokens of row i's sequence:

========================= =============================
token-mean                Σ l_it / N
token-sum                 Σ l_it
seq-mean-token-sum        Σ l_it / S
seq-mean-token-sum-norm   Σ l_it / (S · M)
seq-mean-token-mean       Σ_i (Σ_t l_it / n_i) / S
========================= =============================

A sequence is a row, or all rows of a rollout that has several trajectories: the column
``sequence_tokens`` then has ``n_i``, which the rows of a micro-batch alone do not tell.

Every function takes ``losses`` and ``mask`` ``[B, T]`` and returns a scalar, float32 or wider. A
row without tokens gives 0, a denominator of 0 gives 0, and mismatched shapes raise ValueError.
The names are verl's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from torch import Tensor

from rollcast.contracts.algorithm import Denominators
from rollcast.contracts.engine import LossInputs
from rollcast_algorithms._masking import masked

__all__ = [
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
    """Return the mini-batch's denominators, with the column ``sequence_tokens`` of this micro-batch if there is one."""
    return replace(inputs.denominators, sequence_tokens=inputs.columns.get(SEQUENCE_TOKENS))


def token_mean(losses: Tensor, mask: Tensor, denominators: Denominators) -> Tensor:
    """The mean over all tokens, ``Σ l_it / N``: long responses weigh more (DAPO, arXiv:2503.14476)."""
    return _share(masked("losses", losses, mask).sum(), denominators.tokens)


def token_sum(losses: Tensor, mask: Tensor, denominators: Denominators) -> Tensor:  # noqa: ARG001
    """The sum over all tokens, ``Σ l_it``; the denominators are not used."""
    return masked("losses", losses, mask).sum()


def seq_mean_token_sum(losses: Tensor, mask: Tensor, denominators: Denominators) -> Tensor:
    """The mean over sequences of their sums, ``Σ l_it / S``."""
    return _share(masked("losses", losses, mask).sum(), denominators.sequences)


def seq_mean_token_sum_norm(losses: Tensor, mask: Tensor, denominators: Denominators) -> Tensor:
    """The mean over sequences of sums over a constant, ``Σ l_it / (S · M)`` (Dr. GRPO, arXiv:2503.20783)."""
    return _share(masked("losses", losses, mask).sum(), denominators.sequences * denominators.max_tokens)


def seq_mean_token_mean(losses: Tensor, mask: Tensor, denominators: Denominators) -> Tensor:
    """The mean over sequences of their means, ``Σ_i (Σ_t l_it / n_i) / S`` (GRPO, arXiv:2402.03300)."""
    own = denominators.sequence_tokens
    if own is not None and own.shape != mask.shape[:1]:
        raise ValueError(f"sequence_tokens is {list(own.shape)}, but there are {len(mask)} rows")
    tokens = (mask != 0).sum(-1) if own is None else own.to(mask.device)
    return _share((masked("losses", losses, mask).sum(-1) / tokens.clamp(min=1)).sum(), denominators.sequences)


def _share(total: Tensor, denominator: float) -> Tensor:
    # The product keeps the graph: a share of nothing can still be sent backward.
    return total / denominator if denominator > 0 else total * 0.0
