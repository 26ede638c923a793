"""Outcome estimators, which compare the score of a row with the other samples of its prompt.

In all of them, ``s_i`` is the sum of row i's rewards under the mask, the advantage is equal at all tokens of the row,
and ``returns = advantages``. A row without tokens counts with the score 0 in its group's mean. Inputs: rewards and mask
``[B, T]``, ``group_ids`` int64 ``[B]``. Outputs: float32 ``[B, T]``, zero where the mask is zero. All raise ValueError
for shapes that do not match.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rollcast.contracts.algorithm import REWARD_COMPONENT, AdvantageInputs, AdvantageOutputs, advantage
from rollcast.errors import ConfigError
from rollcast_algorithms._rows import Rows, whiten_rows

__all__ = [
    "GRPO_EPSILON",
    "gdpo",
    "gpg",
    "group_normalised",
    "grpo",
    "grpo_passk",
    "maxrl",
    "opo",
    "reinforce_plus_plus_baseline",
    "rloo",
]

GRPO_EPSILON = 1e-6
"""Added to the group's standard deviation or mean; verl's value."""


_GDPO = {"gdpo_reward_keys": None, "gdpo_reward_weights": None}


@advantage(compares_samples=True, by_group=True, options={"scale_rewards"})
def grpo(inputs: AdvantageInputs) -> AdvantageOutputs:
    """Compute GRPO's group-relative advantages of an outcome score; without std, Dr. GRPO's.

    With mean and std over the rows of row i's group::

        A_i = (s_i - mean) / (std + 1e-6)

    std is the sample standard deviation (n - 1). Without ``norm_adv_by_std_in_grpo``, there is no division. A group of
    one row has mean 0 and std 1 by convention: its advantage is its score.

    Option: ``scale_rewards``, ``group`` (the default) or ``batch``, for the standard deviation of all scores of the
    batch.

    Sources: Shao et al. 2024, DeepSeekMath, arXiv:2402.03300; Liu et al. 2025, Understanding
    R1-Zero-Like Training, arXiv:2503.20783 (without std); Liu et al. 2025, Tricks or Traps? A Deep Dive into RL for LLM
    Reasoning, arXiv:2508.08221 (std of the batch).

    Raises:
        ConfigError: ``scale_rewards`` is neither.
    """
    scale = {"scale_rewards": "group", **inputs.options}["scale_rewards"]
    if scale not in ("group", "batch"):
        raise ConfigError(
            f"algorithm.adv_kwargs.scale_rewards is {scale!r}; valid: group, batch. For no division, set "
            "algorithm.norm_adv_by_std_in_grpo=false"
        )
    rows = Rows(inputs)
    if scale == "group" or not inputs.norm_adv_by_std_in_grpo:
        return rows.spread(group_normalised(rows.scores, inputs))
    scores = rows.scores if inputs.batch_scores is None else inputs.batch_scores
    std = scores.std() if len(scores) > 1 else scores.new_zeros(())
    return rows.spread(_centred(rows.scores, inputs) / (std + GRPO_EPSILON))


@advantage(compares_samples=True, by_group=True)
def grpo_passk(inputs: AdvantageInputs) -> AdvantageOutputs:
    """Compute pass@k advantages: only a group's best row has an advantage, its lead over the second best.

    ::

        A_i = (s_best - s_second) / (std + 1e-6)    for the best row;    0 for the others

    std is as in :func:`grpo`; without ``norm_adv_by_std_in_grpo``, there is no division. If two rows share the best
    score, all advantages are 0. The advantage of a group of one row is 0.

    Source: Tang et al. 2025, Optimizing Language Models for Inference Time Objectives using
    Reinforcement Learning, arXiv:2503.19595.
    """
    rows = Rows(inputs)
    groups, scores = inputs.group_ids, rows.scores
    # After sorting by score within each group, the last two rows of a group are its second best and its best.
    order = scores.argsort(stable=True)
    order = order[groups[order].argsort(stable=True)]
    sizes = groups.bincount()
    ends = sizes.cumsum(0) - 1
    led = sizes > 1
    best, second = order[ends[led]], order[ends[led] - 1]
    lead = scores[best] - scores[second]
    if inputs.norm_adv_by_std_in_grpo:
        lead = lead / (_group_std(scores - inputs.group_mean(scores), inputs)[best] + GRPO_EPSILON)
    return rows.spread(torch.zeros_like(scores).index_copy(0, best, lead))


@advantage(needs={REWARD_COMPONENT}, compares_samples=True, by_group=True, whitens=True, options=_GDPO)
def gdpo(inputs: AdvantageInputs) -> AdvantageOutputs:
    """Compute GDPO advantages: normalise each reward component within its group, sum, and whiten over the tokens.

    With ``s_ik`` the component k of row i's score and ``w_k`` its weight::

        A_i = whiten(Σ_k w_k · (s_ik - mean_k) / (std_k + 1e-6))

    mean and std are as in :func:`grpo`, over the rows of the group that have the component; NaN marks a row that lacks
    it. Such a row, and the only row of a larger group that has it, gets nothing for this component. Whitening uses mean
    and sample variance over the batch's tokens.
    ``token_level_rewards`` are not read, so a KL penalty in the reward has no effect.

    Options: ``gdpo_reward_keys``, names of the components (all by default), and
    ``gdpo_reward_weights``, a weight for each of those keys (1 by default).

    Source: Liu et al. 2026, GDPO: Group reward-Decoupled Normalization Policy Optimization,
    arXiv:2601.05242.

    Raises:
        ColumnError: there are no reward components.
        ConfigError: a key is not among the components, or the numbers of keys and weights differ.
    """
    options = {**_GDPO, **inputs.options}
    rows = Rows(inputs)
    total = torch.zeros_like(rows.scores)
    components = inputs.reward_components
    for key, weight in _weights(components, **options).items():
        component = components[key].to(rows.scores)
        if component.shape != total.shape:
            raise ValueError(f"reward_components[{key!r}] is {list(component.shape)}, but there are {len(total)} rows")
        total = total + weight * _normalised_where_present(component, inputs)
    return rows.spread(whiten_rows(total, rows.lengths()) if inputs.whiten else total)


@advantage(compares_samples=True, by_group=True, whitens=True)
def reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> AdvantageOutputs:
    """Compute REINFORCE++ advantages with the group's mean as baseline, whitened over the tokens.

    ::

        A_i = whiten(s_i - mean)

    The mean is over the rows of row i's group, and 0 for a group of one row; whitened with mean and
    sample variance over the tokens of the batch.

    Source: Hu et al. 2025, REINFORCE++, arXiv:2501.03262.
    """
    rows = Rows(inputs)
    centred = _centred(rows.scores, inputs)
    return rows.spread(whiten_rows(centred, rows.lengths()) if inputs.whiten else centred)


@advantage(compares_samples=True, by_group=True)
def rloo(inputs: AdvantageInputs) -> AdvantageOutputs:
    """Compute RLOO (leave-one-out) advantages: the score minus the mean of the other rows of the group.

    With n rows in the group::

        A_i = s_i - mean_{j≠i} s_j = (s_i - mean) · n / (n - 1)

    The advantage of a group of one row is its score.

    Source: Ahmadian et al. 2024, Back to Basics, arXiv:2402.14740.
    """
    rows = Rows(inputs)
    sizes = inputs.group_sizes()
    return rows.spread(_centred(rows.scores, inputs) * torch.where(sizes > 1, sizes / (sizes - 1).clamp(min=1), 1.0))


@advantage(compares_samples=True, by_group=True)
def maxrl(inputs: AdvantageInputs) -> AdvantageOutputs:
    """Compute MaxRL advantages: the centred score over its group's mean, so that prompts rarely solved weigh more.

    ::

        A_i = (s_i - mean) / (mean + 1e-6)

    The mean is over the rows of row i's group. With scores of 0 and 1 and n rows in a group, the expected gradient is
    that of the log-likelihood of a success, with its series in the rate of failures cut off after n - 1 terms. The
    advantages of a group without a success, and of a group of one row, are 0.

    Source: Tajwar et al. 2026, Maximum Likelihood Reinforcement Learning, arXiv:2602.02710.

    Raises:
        ConfigError: the mean of a group's scores is negative, by which the advantages would change their signs.
    """
    rows = Rows(inputs)
    means = inputs.group_mean(rows.scores)
    if bool((means < 0).any()):
        raise ConfigError(
            "algorithm.adv_estimator=maxrl divides by the mean score of a prompt's samples, and one is "
            f"{float(means.min()):g}; it needs rewards that are not negative, such as 1 for a success and 0 otherwise, "
            "and no KL penalty in the reward"
        )
    return rows.spread((rows.scores - means) / (means + GRPO_EPSILON))


@advantage(compares_samples=True, by_group=True)
def opo(inputs: AdvantageInputs) -> AdvantageOutputs:
    """Compute OPO advantages with the on-policy optimal baseline, the group's length-weighted mean.

    With ``n_j`` the tokens of row j::

        A_i = s_i - Σ_j n_j s_j / Σ_j n_j

    The sums are over row i's group. A group of one row has the baseline 0.

    Source: Hao et al. 2025, On-Policy RL with Optimal Reward Baseline, arXiv:2505.23585.
    """
    rows = Rows(inputs)
    lengths = rows.lengths().double()
    baseline = inputs.group_mean(rows.scores * lengths) / inputs.group_mean(lengths).clamp(min=1e-12)
    return rows.spread(torch.where(inputs.group_sizes() == 1, rows.scores, rows.scores - baseline))


@advantage(compares_samples=True, by_group=True, options={"f_norm"})
def gpg(inputs: AdvantageInputs) -> AdvantageOutputs:
    """Compute GPG (group policy gradient) advantages: centred scores, scaled up to compensate for zero scores.

    With B rows in the batch, of which m have a score other than 0::

        A_i = (B / max(m, 1)) · (s_i - mean) / f_norm

    The mean is over the rows of row i's group, and 0 for a group of one row.

    Option: ``f_norm`` (1.0).

    Source: Chu et al. 2025, GPG, arXiv:2504.02546.
    """
    options = {"f_norm": 1.0, **inputs.options}
    rows = Rows(inputs)
    scores = rows.scores if inputs.batch_scores is None else inputs.batch_scores
    scale = len(scores) / scores.count_nonzero().clamp(min=1)
    return rows.spread(scale * _centred(rows.scores, inputs) / options["f_norm"])


def _centred(scores: Tensor, inputs: AdvantageInputs) -> Tensor:
    """Less the group's mean, which is 0 for a group of one row."""
    return torch.where(inputs.group_sizes() == 1, scores, scores - inputs.group_mean(scores))


def _group_std(deviations: Tensor, inputs: AdvantageInputs) -> Tensor:
    """Sample standard deviation of each row's group, ``[B]``, from deviations from its mean."""
    sizes = inputs.group_sizes()
    return (inputs.group_mean(deviations.square()) * sizes / (sizes - 1).clamp(min=1)).sqrt()


def group_normalised(scores: Tensor, inputs: AdvantageInputs) -> Tensor:
    """Return GRPO's advantage of ``scores`` ``[B]``."""
    centred = _centred(scores, inputs)
    if not inputs.norm_adv_by_std_in_grpo:
        return centred
    return centred / torch.where(inputs.group_sizes() == 1, 1.0, _group_std(centred, inputs) + GRPO_EPSILON)


def _normalised_where_present(scores: Tensor, inputs: AdvantageInputs) -> Tensor:
    """Return GRPO's advantage of ``scores`` ``[B]`` among the rows that are not NaN; 0 for the others."""
    absent = scores.isnan()
    if not bool(absent.any()):
        return group_normalised(scores, inputs)
    rows = absent.logical_not().nonzero().flatten()
    groups = torch.unique(inputs.group_ids[rows], return_inverse=True)[1]
    part = group_normalised(scores[rows], replace(inputs, group_ids=groups))
    # The convention for a group of one row does not hold for a row whose group has others.
    alone = (groups.bincount()[groups] == 1) & (inputs.group_sizes()[rows] > 1)
    return torch.zeros_like(scores).index_copy(0, rows, part.masked_fill(alone, 0.0))


def _weights(
    components: Mapping[str, Any],
    gdpo_reward_keys: Sequence[str] | None,
    gdpo_reward_weights: Sequence[float] | None,
) -> dict[str, float]:
    keys = sorted(components) if gdpo_reward_keys is None else list(gdpo_reward_keys)
    missing = [key for key in keys if key not in components]
    if missing:
        known = ", ".join(sorted(components))
        raise ConfigError(
            f"algorithm.adv_kwargs.gdpo_reward_keys names {', '.join(missing)}; the reward's components are {known}"
        )
    if gdpo_reward_weights is None:
        return dict.fromkeys(keys, 1.0)
    if gdpo_reward_keys is None or len(gdpo_reward_weights) != len(keys):
        raise ConfigError(
            f"algorithm.adv_kwargs.gdpo_reward_weights has {len(gdpo_reward_weights)} weights, but gdpo_reward_keys "
            f"{'is not set' if gdpo_reward_keys is None else f'names {len(keys)}'}; give one weight for each key"
        )
    return {key: float(weight) for key, weight in zip(keys, gdpo_reward_weights, strict=True)}
