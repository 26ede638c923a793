"""The contracts of the algorithm's pure parts: advantages, policy losses, aggregation, KL penalties.

Each part is a plain function over tensors, found by name in its registry. Axes: ``B`` rows
(samples), ``T`` response positions. Masks are ``[B, T]`` with 1 where the policy chose the token;
a part must give the same answer whatever stands under a 0.

Example::

    from rollcast.contracts.algorithm import AdvantageInputs, AdvantageOutputs, advantage

    @advantage(needs_groups=True)
    def centred(inputs: AdvantageInputs) -> AdvantageOutputs:
        score = torch.where(inputs.response_mask != 0, inputs.token_level_rewards, 0.0).sum(-1)
        score = score - inputs.group_mean(score)
        return AdvantageOutputs.from_scores(score, inputs.response_mask)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from rollcast.plugins import Registry, is_callable

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "AdvantageEstimator",
    "AdvantageInputs",
    "AdvantageNeeds",
    "AdvantageOutputs",
    "Denominators",
    "KlPenalty",
    "LossAggregation",
    "PolicyLoss",
    "PolicyLossInputs",
    "PolicyLossOutput",
    "PolicyLossPreparation",
    "advantage",
    "advantage_needs",
    "advantages",
    "kl_penalties",
    "kl_penalty",
    "loss_aggregations",
    "needs_vocabulary",
    "policy_loss",
    "policy_losses",
    "prepare_policy_loss",
]


@dataclass(frozen=True)
class AdvantageInputs:
    """What an advantage estimator may read.

    Attributes:
        token_level_rewards: float ``[B, T]``; the scores less a KL penalty if one is in the reward.
        response_mask: ``[B, T]``, 1 where the policy chose the token.
        group_ids: int64 ``[B]``; rows of one prompt share an id, ids are ``0 .. groups - 1``.
        values: float ``[B, T]`` of a critic, or None. This and the tensors below that are None or
            empty are given to estimators that :func:`advantage` says need them.
        gamma, lam: discount and GAE lambda (verl's keys of the same names).
        norm_adv_by_std_in_grpo: divide by the group's standard deviation.
        options: further keys of the config's ``algorithm.adv_kwargs``.
        old_log_probs: float ``[B, T]``, of the sampled tokens under the policy before the update.
        sum_pi_squared: float ``[B, T]``, the sum over the vocabulary of that policy's squared
            probabilities at each position.
        reward_baselines: float ``[B]``, the score of a greedy response to each row's prompt.
        reward_components: name → float ``[B]``, the parts that a row's score was made of.
        rollout_is_weights: float ``[B, T]``, importance weights of the rollout correction; given
            to every estimator where there is such a correction.
    """

    token_level_rewards: Tensor
    response_mask: Tensor
    group_ids: Tensor
    values: Tensor | None = None
    gamma: float = 1.0
    lam: float = 1.0
    norm_adv_by_std_in_grpo: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    old_log_probs: Tensor | None = None
    sum_pi_squared: Tensor | None = None
    reward_baselines: Tensor | None = None
    reward_components: Mapping[str, Tensor] = field(default_factory=dict)
    rollout_is_weights: Tensor | None = None

    def group_sizes(self) -> Tensor:
        """Rows of each row's group, int64 ``[B]``."""
        return self.group_ids.bincount().index_select(0, self.group_ids)

    def group_mean(self, score: Tensor) -> Tensor:
        """Mean of ``score`` ``[B]`` over each row's group, as ``[B]``."""
        sums = score.new_zeros(int(self.group_ids.max()) + 1 if len(score) else 0)
        sums.index_add_(0, self.group_ids, score)
        return sums.index_select(0, self.group_ids) / self.group_sizes().to(score.dtype)


@dataclass(frozen=True)
class AdvantageOutputs:
    """``advantages`` and ``returns``, float32 ``[B, T]``, zero where the mask is zero."""

    advantages: Tensor
    returns: Tensor

    @classmethod
    def from_scores(cls, scores: Tensor, response_mask: Tensor) -> AdvantageOutputs:
        """Spread one score a row (``[B]``) over its response tokens, as float32."""
        import torch

        from rollcast.protocol import empty_tensor

        chosen = response_mask if response_mask.dtype == torch.bool else response_mask != 0
        spread = empty_tensor(chosen.shape, torch.float32, scores.device)
        column = scores.detach().float().unsqueeze(-1)
        torch.where(chosen, column, torch.zeros((), device=scores.device), out=spread)
        return cls(spread, spread)


@dataclass(frozen=True)
class AdvantageNeeds:
    """What an estimator needs from the trainer.

    ``groups`` are several samples a prompt. Each of the others is the tensor of that name in
    :class:`AdvantageInputs`: ``values`` need a critic, ``reward_baselines`` a greedy pass over the
    prompts, ``sum_pi_squared`` an engine that gives it, ``reward_components`` a reward that has them.
    """

    values: bool = False
    groups: bool = False
    old_log_probs: bool = False
    sum_pi_squared: bool = False
    reward_baselines: bool = False
    reward_components: bool = False


AdvantageEstimator = Callable[[AdvantageInputs], AdvantageOutputs]
_E = TypeVar("_E", bound=AdvantageEstimator)
_NEEDS = "__rollcast_advantage_needs__"


def advantage(
    *,
    needs_values: bool = False,
    needs_groups: bool = False,
    needs_old_log_probs: bool = False,
    needs_sum_pi_squared: bool = False,
    needs_reward_baselines: bool = False,
    needs_reward_components: bool = False,
) -> Callable[[_E], _E]:
    """Say what an estimator needs, see :class:`AdvantageNeeds`; the function comes back unwrapped."""
    needs = AdvantageNeeds(
        values=needs_values,
        groups=needs_groups,
        old_log_probs=needs_old_log_probs,
        sum_pi_squared=needs_sum_pi_squared,
        reward_baselines=needs_reward_baselines,
        reward_components=needs_reward_components,
    )

    def mark(function: _E) -> _E:
        setattr(function, _NEEDS, needs)
        return function

    return mark


def advantage_needs(estimator: AdvantageEstimator) -> AdvantageNeeds:
    """What :func:`advantage` said of ``estimator``; nothing needed where it said nothing."""
    needs = getattr(estimator, _NEEDS, AdvantageNeeds())
    return needs if isinstance(needs, AdvantageNeeds) else AdvantageNeeds()


@dataclass(frozen=True)
class Denominators:
    """Counts over the whole mini-batch: all its micro-batches on all data-parallel ranks.

    A loss that divides by these has the same gradient however the batch was split.

    Attributes:
        tokens: response tokens under the mask.
        sequences: rows with at least one such token.
        max_tokens: the longest response that the run allows (Dr. GRPO's constant).
        present_tokens: where rows that add nothing to the loss were left out of the batch, the tokens
            that are in it; means over tokens that are no part of the loss divide by it. None where
            it is ``tokens``.
    """

    tokens: float
    sequences: float
    max_tokens: float
    present_tokens: float | None = None


class LossAggregation(Protocol):
    """Reduce per-token losses to this micro-batch's share of the mini-batch's loss."""

    def __call__(self, losses: Tensor, mask: Tensor, denominators: Denominators) -> Tensor:
        """``losses`` and ``mask`` are ``[B, T]``; returns a scalar that adds up over micro-batches."""
        ...


class KlPenalty(Protocol):
    """A per-token estimate of KL(policy ‖ reference) from the two log-probs of sampled tokens."""

    def __call__(self, log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
        """Both ``[B, T]``, or ``[B, T, V]`` if it needs the vocabulary; returns ``[B, T]``."""
        ...


_K = TypeVar("_K", bound=Callable[..., Any])
_VOCABULARY = "__rollcast_needs_vocabulary__"


def kl_penalty(*, needs_vocabulary: bool) -> Callable[[_K], _K]:
    """Say whether a penalty needs the log-probs of the whole vocabulary; comes back unwrapped.

    Such a penalty cannot stand in a loss function or a reward, which see the sampled tokens only:
    it is asked of an engine, by name.
    """

    def mark(function: _K) -> _K:
        setattr(function, _VOCABULARY, needs_vocabulary)
        return function

    return mark


def needs_vocabulary(penalty: KlPenalty) -> bool:
    """What :func:`kl_penalty` said of ``penalty``; False where it said nothing."""
    return bool(getattr(penalty, _VOCABULARY, False))


@dataclass(frozen=True)
class PolicyLossInputs:
    """What a policy loss may read; all tensors ``[B, T]``.

    Attributes:
        log_probs: of the policy in training, with gradient.
        old_log_probs: of the policy that the ratio is taken against.
        advantages, response_mask: as computed by the estimator.
        clip_ratio_low, clip_ratio_high, clip_ratio_c: PPO's clip range and dual clip (verl's keys).
        options: further keys of ``actor.policy_loss_kwargs``.
        prepared: what the loss's own preparation computed over the whole batch, see :func:`policy_loss`.
    """

    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    response_mask: Tensor
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    clip_ratio_c: float = 3.0
    options: Mapping[str, Any] = field(default_factory=dict)
    prepared: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class PolicyLossOutput:
    """Per-token ``losses`` ``[B, T]`` and per-token ``metrics`` (each ``[B, T]``, no gradient).

    Metrics are averaged over the tokens of the mini-batch by whoever calls the loss.
    """

    losses: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


PolicyLoss = Callable[[PolicyLossInputs], PolicyLossOutput]
PolicyLossPreparation = Callable[[PolicyLossInputs], Mapping[str, "Tensor"]]
"""Columns ``[B, T]`` from the whole batch before its update, when ``log_probs`` are the old ones."""
_L = TypeVar("_L", bound=PolicyLoss)
_PREPARE = "__rollcast_prepare_policy_loss__"


def policy_loss(*, prepare: PolicyLossPreparation) -> Callable[[_L], _L]:
    """Say that a loss depends on the batch as a whole, and how; the function comes back unwrapped.

    A loss sees a micro-batch, and must not depend on how the batch was cut into them. One that
    compares its tokens with all others leaves that to ``prepare``, which is called once with the
    whole batch; the columns that it gives travel with their rows, and arrive as
    :attr:`PolicyLossInputs.prepared`.
    """

    def mark(function: _L) -> _L:
        setattr(function, _PREPARE, prepare)
        return function

    return mark


def prepare_policy_loss(loss: PolicyLoss, inputs: PolicyLossInputs) -> Mapping[str, Tensor]:
    """What ``loss`` prepares from the whole batch, by name; empty for a loss that needs nothing."""
    prepare = getattr(loss, _PREPARE, None)
    return {} if prepare is None else prepare(inputs)


advantages: Registry[AdvantageEstimator] = Registry(
    "rollcast.advantages", is_callable(1), "algorithm.adv_estimator", description="advantage estimators"
)
policy_losses: Registry[PolicyLoss] = Registry(
    "rollcast.policy_losses", is_callable(1), "actor.policy_loss", description="policy losses over per-token quantities"
)
loss_aggregations: Registry[LossAggregation] = Registry(
    "rollcast.loss_aggregations",
    is_callable(3),
    "actor.loss_agg_mode",
    description="reductions of per-token losses to one number",
)
kl_penalties: Registry[KlPenalty] = Registry(
    "rollcast.kl_penalties",
    is_callable(2),
    ("actor.kl_loss_type", "algorithm.kl_penalty"),
    description="estimators of the KL divergence per token",
)
