"""Advantage estimators: how much better a token was than what was expected."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from rollcast.contracts.algorithm import AdvantageInputs, AdvantageOutputs, advantage
from rollcast_algorithms._masking import masked

__all__ = ["GRPO_EPSILON", "WHITEN_EPSILON", "gae", "grpo"]

GRPO_EPSILON = 1e-6
"""Added to the group's standard deviation; verl's value."""

WHITEN_EPSILON = 1e-8
"""Added to the variance when GAE's advantages are whitened; verl's value."""


@advantage(needs_groups=True)
def grpo(inputs: AdvantageInputs) -> AdvantageOutputs:
    """Group-relative advantage of an outcome score (GRPO).

    With ``s_i`` the sum of row i's rewards under the mask, and mean and std over the rows of its
    group::

        A_it = (s_i - mean) / (std + 1e-6)      returns = A

    std is the sample standard deviation (n - 1). Without ``norm_adv_by_std_in_grpo`` nothing is
    divided (Dr. GRPO). A group of one row has mean 0 and std 1 by convention: its advantage is its
    score. A row without any token takes part in its group's mean with the score 0.

    Sources: Shao et al. 2024, DeepSeekMath, arXiv:2402.03300; Liu et al. 2025, Understanding
    R1-Zero-Like Training, arXiv:2503.20783 (without std).

    Args:
        inputs: rewards and mask ``[B, T]``, ``group_ids`` int64 ``[B]``.

    Returns:
        Both float32 ``[B, T]``, zero where the mask is zero.

    Raises:
        ValueError: the shapes do not fit together.
    """
    mask = inputs.response_mask
    rewards = masked("token_level_rewards", inputs.token_level_rewards, mask)
    if inputs.group_ids.shape != mask.shape[:1]:
        raise ValueError(f"group_ids is {list(inputs.group_ids.shape)}, but there are {len(mask)} rows")
    # In float32 the mean of equal scores can differ from them in the last bit; divided by a std of
    # that same bit, rounding would turn into an advantage.
    scores = rewards.double().sum(-1)
    sizes = inputs.group_sizes()
    alone = sizes == 1
    centred = torch.where(alone, scores, scores - inputs.group_mean(scores))
    if inputs.norm_adv_by_std_in_grpo:
        variance = inputs.group_mean(centred.square()) * sizes / (sizes - 1).clamp(min=1)
        centred = centred / torch.where(alone, 1.0, variance.sqrt() + GRPO_EPSILON)
    return AdvantageOutputs.from_scores(centred.float(), mask != 0)


@advantage(needs_values=True)
def gae(inputs: AdvantageInputs) -> AdvantageOutputs:
    """Generalised advantage estimation over the policy's own tokens.

    Over the tokens under the mask, in order, with ``V`` the critic's values and 0 after the last::

        delta_t = r_t + gamma · V_{t+1} - V_t
        A_t = delta_t + gamma · lam · A_{t+1}
        returns_t = A_t + V_t

    Tokens under a zero inside a response (a tool's answer, say) are skipped over: the next token is
    the next one that the policy chose, as if the others were not there, and no discount is paid for
    them. The advantages are then whitened over all tokens under the mask, ``(A - mean) /
    sqrt(var + 1e-8)`` with the sample variance; the returns stem from those before.

    Source: Schulman et al. 2016, High-Dimensional Continuous Control Using Generalized Advantage
    Estimation, arXiv:1506.02438. Skipping and whitening are as in verl.

    Args:
        inputs: rewards, values and mask ``[B, T]``; ``gamma`` and ``lam``.

    Returns:
        Both float32 ``[B, T]``, zero where the mask is zero.

    Raises:
        ValueError: there are no values, or the shapes do not fit together.
    """
    if inputs.values is None:
        raise ValueError("gae needs the values of a critic, but inputs.values is None")
    chosen = inputs.response_mask != 0
    rewards = masked("token_level_rewards", inputs.token_level_rewards, chosen).float()
    values = masked("values", inputs.values, chosen).float()
    # Move each row's chosen tokens to its front: then the successor is the next column.
    order = torch.argsort((~chosen).to(torch.uint8), dim=-1, stable=True)
    front_values = values.gather(-1, order)
    deltas = rewards.gather(-1, order) + inputs.gamma * pad(front_values, (0, 1))[:, 1:] - front_values
    front = _discounted_suffix_sums(deltas, inputs.gamma * inputs.lam)
    raw = torch.where(chosen, torch.zeros_like(front).scatter(-1, order, front), 0.0)
    return AdvantageOutputs(_whiten(raw, chosen), raw + values)


def _discounted_suffix_sums(terms: Tensor, factor: float) -> Tensor:
    """``y_t = x_t + factor · y_{t+1}`` along the last axis of ``[B, T]``, in log2(T) steps.

    After the step of stride k each ``y_t`` holds the sum of ``factor^i · x_{t+i}`` for ``i < 2k``.
    """
    sums = terms
    stride = 1
    while stride < terms.shape[-1]:
        sums = sums + factor**stride * pad(sums[:, stride:], (0, stride))
        stride *= 2
    return sums


def _whiten(values: Tensor, chosen: Tensor) -> Tensor:
    """Mean 0 and sample variance 1 over ``chosen``; 0 elsewhere, and for a single token."""
    count = chosen.sum()
    mean = values.sum() / count.clamp(min=1)
    centred = torch.where(chosen, values - mean, 0.0)
    variance = centred.square().sum() / (count - 1).clamp(min=1)
    return centred * torch.rsqrt(variance + WHITEN_EPSILON)
