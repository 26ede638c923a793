"""Estimators over the turns of a rollout, in which a turn is one action whatever its number of tokens.

Both read the column ``turn_ids`` ``[B, T]``; a turn's reward is the sum of the rewards of its tokens. Inputs:
rewards and mask ``[B, T]``. Outputs: float32 ``[B, T]``, zero where the mask is zero. Both raise ColumnError for a
missing column, and ValueError for shapes that do not match.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from rollcast.contracts.algorithm import AdvantageInputs, AdvantageOutputs, advantage
from rollcast_algorithms._masking import masked
from rollcast_algorithms._rows import discounted_suffix_sums, whiten
from rollcast_algorithms._turns import Turns
from rollcast_algorithms.advantages.groups import GRPO_EPSILON, group_normalised

__all__ = ["gae_turn", "gigpo"]


@advantage(needs={"values", "turn_ids"}, by_group=True, whitens=True)
def gae_turn(inputs: AdvantageInputs) -> AdvantageOutputs:
    """Compute generalised advantage estimates over turns.

    With ``V_k`` the critic's value before turn k's first token, 0 after the last turn, and ``r_k`` the turn's reward::

        delta_k = r_k + gamma · V_{k+1} - V_k
        A_k = delta_k + gamma · lam · A_{k+1}
        returns_k = A_k + V_k

    Each token of a turn has its turn's advantage and return. Discounts count turns, so a long answer is not discounted
    more than a short one. The advantages are then whitened over all tokens under the mask; the returns are computed
    from the advantages before whitening.

    Source: Schulman et al. 2016, arXiv:1506.02438, with turns for actions.
    """
    chosen = inputs.response_mask != 0
    turns = Turns(chosen, inputs.column("turn_ids"))
    rewards = turns.pad(turns.sums(masked("token_level_rewards", inputs.token_level_rewards, chosen).detach()))
    values = turns.pad(turns.firsts(masked("values", inputs.values, chosen).detach()).double())
    deltas = rewards + inputs.gamma * pad(values, (0, 1))[:, 1:] - values
    advantages = discounted_suffix_sums(deltas, torch.full_like(deltas, inputs.gamma * inputs.lam))
    raw, returns = turns.spread(turns.unpad(advantages)), turns.spread(turns.unpad(advantages + values))
    return AdvantageOutputs(whiten(raw, chosen) if inputs.whiten else raw, returns)


@advantage(needs={"turn_ids", "anchor_ids"}, compares_samples=True, by_group=True, options={"step_advantage_w"})
def gigpo(inputs: AdvantageInputs) -> AdvantageOutputs:
    """Compute GiGPO advantages, which compare rollouts within their group and turns that start from the same state.

    With ``s_i`` the sum of rollout i's rewards, ``r_ik`` the reward of its turn k, and the anchor of a turn the state
    that it starts from (``anchor_ids`` at its first token)::

        R_ik = r_ik + gamma · R_i,k+1
        A_E,i = (s_i - mean) / (std + 1e-6)        over the group of rollout i
        A_S,ik = (R_ik - mean) / (std + 1e-6)      over the group's turns with the anchor of turn ik
        A = A_E + step_advantage_w · A_S

    std is the sample standard deviation; without ``norm_adv_by_std_in_grpo``, there is no division. For a turn with a
    unique anchor, A_S = 0, so that GiGPO equals GRPO if no state repeats, as in the paper (verl-agent uses R instead).
    ``returns = advantages``.

    Option: ``step_advantage_w`` (1.0).

    Source: Feng et al. 2025, Group-in-Group Policy Optimization for LLM Agent Training, arXiv:2505.10978.
    """
    weight = float({"step_advantage_w": 1.0, **inputs.options}["step_advantage_w"])
    chosen = inputs.response_mask != 0
    anchors = inputs.column("anchor_ids")
    if anchors.shape != chosen.shape:
        raise ValueError(f"anchor_ids is {list(anchors.shape)}, but the mask is {list(chosen.shape)}")
    turns = Turns(chosen, inputs.column("turn_ids"))
    rewards = turns.sums(masked("token_level_rewards", inputs.token_level_rewards, chosen).detach())
    scores = rewards.new_zeros(len(chosen)).index_add_(0, turns.rows, rewards)
    episode = group_normalised(scores, inputs)[turns.rows]
    padded = turns.pad(rewards)
    steps = turns.unpad(discounted_suffix_sums(padded, torch.full_like(padded, inputs.gamma)))
    keys = torch.stack([inputs.group_ids[turns.rows], turns.firsts(anchors).long()], -1)
    groups = torch.unique(keys, dim=0, return_inverse=True)[1]
    spread = turns.spread(episode + weight * _normalised(steps, groups, inputs.norm_adv_by_std_in_grpo))
    return AdvantageOutputs(spread, spread)


def _normalised(values: Tensor, groups: Tensor, by_std: bool) -> Tensor:
    """Return values less their group's mean, over its standard deviation if ``by_std``; 0 in a group of one."""
    sizes = groups.bincount()
    means = values.new_zeros(len(sizes)).index_add_(0, groups, values) / sizes
    centred = values - means[groups]
    if not by_std:
        return centred
    squares = values.new_zeros(len(sizes)).index_add_(0, groups, centred.square())
    return centred / ((squares / (sizes - 1).clamp(min=1)).sqrt()[groups] + GRPO_EPSILON)
