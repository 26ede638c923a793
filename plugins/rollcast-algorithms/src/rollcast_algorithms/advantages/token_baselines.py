"""Optimal token baselines, with a separate baseline at each position of a group's responses.

The baseline with the least variance weights each return by the squared norm of the score function up to the token. For
a softmax, the squared norm of one token is ``1 - 2π + Σ_v π_v²``, from the token's own probability and a sum over the
vocabulary, which the engine computes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollcast.contracts.algorithm import AdvantageInputs, AdvantageOutputs, advantage
from rollcast_algorithms._masking import masked
from rollcast_algorithms._rows import suffix_sums

__all__ = ["OTB_EPSILON", "optimal_token_baseline", "tir_optimal_token_baseline"]

OTB_EPSILON = 1e-8
"""Added to the sum of weights; verl's value."""
_NEEDS = ("old_log_probs", "sum_pi_squared")
_OPTIONS = {"handle_zero_tail": True}


@advantage(needs=_NEEDS, optional={"rollout_is_weights"}, compares_samples=True, by_group=True, options=_OPTIONS)
def optimal_token_baseline(inputs: AdvantageInputs) -> AdvantageOutputs:
    """Compute advantages with the optimal token baseline, by column; for single-turn responses.

    For row i and column t, with the sums over the rows j of its group that have a token there::

        w_t = 1 - 2π_t + Σ_v π_v²         W_t = Σ_{u ≤ t} c_u² w_u
        G_t = r_t + G_{t+1}               B_t = Σ_j G_jt W_jt / (Σ_j W_jt + 1e-8)
        A_it = G_it - B_t                 returns = G

    ``π_t = exp(old_log_prob)``; c are the rollout correction's importance weights, or 1 without a correction. Where no
    other row of the group has a token, the baseline would be the row's own return, so it is set to 0. If the option
    ``handle_zero_tail`` is false, it is set to 0 only in groups of one row.

    Option: ``handle_zero_tail`` (true).

    Source: Li et al. 2026, The Optimal Token Baseline: Variance Reduction for Long-Horizon LLM-RL,
    PMLR 306.

    Args:
        inputs: rewards, mask, ``old_log_probs`` and ``sum_pi_squared`` ``[B, T]``, ``group_ids`` int64
            ``[B]``; ``rollout_is_weights`` ``[B, T]`` if there are any.

    Returns:
        Both float32 ``[B, T]``, zero where the mask is zero.

    Raises:
        ColumnError: a column is missing.
        ValueError: the shapes do not fit together.
    """
    chosen, returns, weights = _returns_and_weights(inputs)
    baselines = _baselines(returns, weights, chosen, inputs)
    return AdvantageOutputs(torch.where(chosen, returns - baselines, 0.0).float(), returns.float())


@advantage(needs=_NEEDS, optional={"rollout_is_weights"}, compares_samples=True, by_group=True, options=_OPTIONS)
def tir_optimal_token_baseline(inputs: AdvantageInputs) -> AdvantageOutputs:
    """Compute advantages with the optimal token baseline, by index of the policy's tokens; for multi-turn responses.

    Like :func:`optimal_token_baseline`, but the k-th token that the policy chose in a row is compared with the k-th
    token that it chose in the other rows, whatever tools or users wrote in between.

    Source, arguments, option and errors are the same.
    """
    chosen, returns, weights = _returns_and_weights(inputs)
    # Move each row's own tokens to its front and masked tokens behind them.
    order = torch.argsort((~chosen).to(torch.uint8), dim=-1, stable=True)
    front_returns, front_weights, front_chosen = (tensor.gather(-1, order) for tensor in (returns, weights, chosen))
    front = _baselines(front_returns, front_weights, front_chosen, inputs)
    baselines = torch.zeros_like(returns).scatter(-1, order, front)
    return AdvantageOutputs(torch.where(chosen, returns - baselines, 0.0).float(), returns.float())


def _returns_and_weights(inputs: AdvantageInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mask as bool, and G and W, float64, zero where the mask is zero; all ``[B, T]``."""
    chosen = inputs.response_mask != 0
    rewards = masked("token_level_rewards", inputs.token_level_rewards, chosen).double()
    own, squares = (masked(name, inputs.column(name), chosen).double() for name in _NEEDS)
    # The squared norm is never negative, but half precision can make it negative.
    weights = torch.where(chosen, (1 - 2 * own.exp() + squares).clamp(min=0.0), 0.0)
    if "rollout_is_weights" in inputs.columns:
        weights = weights * masked("rollout_is_weights", inputs.rollout_is_weights, chosen).double().square()
    return (
        chosen,
        torch.where(chosen, suffix_sums(rewards), 0.0),
        torch.where(chosen, weights.cumsum(-1), 0.0),
    )


def _baselines(returns: Tensor, weights: Tensor, chosen: Tensor, inputs: AdvantageInputs) -> Tensor:
    """Return each group's weighted mean in each column, ``[B, T]``."""
    options = {**_OPTIONS, **inputs.options}
    groups = inputs.group_ids
    if groups.shape != chosen.shape[:1]:
        raise ValueError(f"group_ids is {list(groups.shape)}, but there are {len(chosen)} rows")
    count = int(groups.max()) + 1 if len(groups) else 0

    def over_group(tensor: Tensor) -> Tensor:
        return tensor.new_zeros(count, *tensor.shape[1:]).index_add_(0, groups, tensor).index_select(0, groups)

    means = over_group(returns * weights) / (over_group(weights) + OTB_EPSILON)
    if options["handle_zero_tail"]:
        compared = over_group(chosen.long()) > 1
    else:
        compared = (over_group(chosen.any(-1).long()) > 1).unsqueeze(-1)
    return torch.where(compared, means, 0.0)
