"""Estimators based on the return of each token: GAE, REINFORCE++ and ReMax."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from rollcast.contracts.algorithm import AdvantageInputs, AdvantageOutputs, advantage
from rollcast_algorithms._masking import masked
from rollcast_algorithms._rows import discounted_suffix_sums, suffix_sums, whiten

__all__ = ["gae", "reinforce_plus_plus", "remax"]


@advantage(needs={"values"}, by_group=True, whitens=True)
def gae(inputs: AdvantageInputs) -> AdvantageOutputs:
    """Compute generalised advantage estimates (GAE) over the policy's own tokens.

    Over the tokens under the mask, in order, with ``V`` the critic's values and 0 after the last::

        delta_t = r_t + gamma · V_{t+1} - V_t
        A_t = delta_t + gamma · lam · A_{t+1}
        returns_t = A_t + V_t

    Masked tokens inside a response, such as a tool's answer, are skipped without a discount: the next token is the next
    one that the policy chose. The advantages are then whitened over all tokens under the mask, ``(A - mean) /
    sqrt(var + 1e-8)`` with the sample variance; the returns are computed from the advantages before whitening.

    Source: Schulman et al. 2016, High-Dimensional Continuous Control Using Generalized Advantage
    Estimation, arXiv:1506.02438. Skipping and whitening are as in verl.

    Args:
        inputs: rewards, values and mask ``[B, T]``; ``gamma`` and ``lam``.

    Returns:
        Both float32 ``[B, T]``, zero where the mask is zero.

    Raises:
        ColumnError: there are no ``values``.
        ValueError: the shapes do not fit together.
    """
    chosen = inputs.response_mask != 0
    rewards = masked("token_level_rewards", inputs.token_level_rewards, chosen).float()
    values = masked("values", inputs.values, chosen).float()
    # Move each row's chosen tokens to its front, so that the successor of a token is in the next column.
    order = torch.argsort((~chosen).to(torch.uint8), dim=-1, stable=True)
    front_values = values.gather(-1, order)
    deltas = rewards.gather(-1, order) + inputs.gamma * pad(front_values, (0, 1))[:, 1:] - front_values
    front = discounted_suffix_sums(deltas, torch.full_like(deltas, inputs.gamma * inputs.lam))
    raw = torch.where(chosen, torch.zeros_like(front).scatter(-1, order, front), 0.0)
    return AdvantageOutputs(whiten(raw, chosen) if inputs.whiten else raw, raw + values)


@advantage(by_group=True, whitens=True)
def reinforce_plus_plus(inputs: AdvantageInputs) -> AdvantageOutputs:
    """Compute REINFORCE++ advantages: discounted returns, whitened over the tokens of the batch.

    Over the tokens under the mask, in order::

        returns_t = r_t + gamma · returns_{t+1}
        A_t = (returns_t - mean) / sqrt(var + 1e-8)

    mean and sample variance are over all tokens under the mask. Masked tokens inside a response are skipped without a
    discount. Add the KL penalty to the reward (``algorithm.use_kl_in_reward``).

    Source: Hu et al. 2025, REINFORCE++, arXiv:2501.03262.

    Args:
        inputs: rewards and mask ``[B, T]``; ``gamma``.

    Returns:
        Both float32 ``[B, T]``, zero where the mask is zero.

    Raises:
        ValueError: the shapes do not fit together.
    """
    chosen = inputs.response_mask != 0
    rewards = masked("token_level_rewards", inputs.token_level_rewards, chosen).float()
    if inputs.gamma == 1.0:
        sums = suffix_sums(rewards)
    else:
        sums = discounted_suffix_sums(rewards, torch.where(chosen, inputs.gamma, 1.0))
    returns = torch.where(chosen, sums, 0.0)
    # A separate tensor, because a tensor returned for both would be whitened for both.
    return AdvantageOutputs(whiten(returns, chosen) if inputs.whiten else returns.clone(), returns)


@advantage(needs={"reward_baselines"}, by_group=True)
def remax(inputs: AdvantageInputs) -> AdvantageOutputs:
    """Compute ReMax advantages: the return minus the score of a greedy response to the prompt.

    With ``b_i`` the score of the greedy response to row i's prompt::

        returns_t = r_t + returns_{t+1}      A_t = returns_t - b_i

    over the tokens under the mask, in order, without a discount.

    Source: Li et al. 2024, ReMax, arXiv:2310.10505.

    Args:
        inputs: rewards and mask ``[B, T]``, ``reward_baselines`` ``[B]``.

    Returns:
        Both float32 ``[B, T]``, zero where the mask is zero.

    Raises:
        ColumnError: there are no ``reward_baselines``.
        ValueError: the shapes do not fit together.
    """
    baselines, chosen = inputs.reward_baselines, inputs.response_mask != 0
    if baselines.shape != chosen.shape[:1]:
        raise ValueError(f"reward_baselines is {list(baselines.shape)}, but there are {len(chosen)} rows")
    rewards = masked("token_level_rewards", inputs.token_level_rewards, chosen).float()
    returns = torch.where(chosen, suffix_sums(rewards), 0.0)
    advantages = torch.where(chosen, returns - baselines.float().unsqueeze(-1), 0.0)
    return AdvantageOutputs(advantages, returns)
