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

from rollcast.plugins.registry import Registry, is_callable

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
    "advantage",
    "advantage_needs",
    "advantages",
    "kl_penalties",
    "loss_aggregations",
    "policy_losses",
]


@dataclass(frozen=True)
class AdvantageInputs:
    """What an advantage estimator may read.

    Attributes:
        token_level_rewards: float ``[B, T]``; the scores less a KL penalty if one is in the reward.
        response_mask: ``[B, T]``, 1 where the policy chose the token.
        group_ids: int64 ``[B]``; rows of one prompt share an id, ids are ``0 .. groups - 1``.
        values: float ``[B, T]`` of a critic, or None.
        gamma, lam: discount and GAE lambda (verl's keys of the same names).
        norm_adv_by_std_in_grpo: divide by the group's standard deviation.
        options: further keys of the config's ``algorithm.adv_kwargs``, for third-party estimators.
    """

    token_level_rewards: Tensor
    response_mask: Tensor
    group_ids: Tensor
    values: Tensor | None = None
    gamma: float = 1.0
    lam: float = 1.0
    norm_adv_by_std_in_grpo: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)

    def group_sizes(self) -> Tensor:
        """Rows of each row's group, int64 ``[B]``."""
        return self.group_ids.bincount()[self.group_ids]

    def group_mean(self, score: Tensor) -> Tensor:
        """Mean of ``score`` ``[B]`` over each row's group, as ``[B]``."""
        sums = score.new_zeros(int(self.group_ids.max()) + 1 if len(score) else 0)
        sums.index_add_(0, self.group_ids, score)
        return sums[self.group_ids] / self.group_sizes().to(score.dtype)


@dataclass(frozen=True)
class AdvantageOutputs:
    """``advantages`` and ``returns``, float ``[B, T]``, zero where the mask is zero."""

    advantages: Tensor
    returns: Tensor

    @classmethod
    def from_scores(cls, scores: Tensor, response_mask: Tensor) -> AdvantageOutputs:
        """Spread one score a row (``[B]``) over its response tokens."""
        spread = scores.unsqueeze(-1) * response_mask.to(scores.dtype)
        return cls(spread, spread)


@dataclass(frozen=True)
class AdvantageNeeds:
    """What an estimator needs from the trainer: a critic's values, several samples a prompt."""

    values: bool = False
    groups: bool = False


AdvantageEstimator = Callable[[AdvantageInputs], AdvantageOutputs]
_E = TypeVar("_E", bound=AdvantageEstimator)
_NEEDS = "__rollcast_advantage_needs__"


def advantage(*, needs_values: bool = False, needs_groups: bool = False) -> Callable[[_E], _E]:
    """Say what an estimator needs; the function comes back unwrapped."""

    def mark(function: _E) -> _E:
        setattr(function, _NEEDS, AdvantageNeeds(values=needs_values, groups=needs_groups))
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
        """Both ``[B, T]``; returns ``[B, T]``."""
        ...


@dataclass(frozen=True)
class PolicyLossInputs:
    """What a policy loss may read; all tensors ``[B, T]``.

    Attributes:
        log_probs: of the policy in training, with gradient.
        old_log_probs: of the policy that the ratio is taken against.
        advantages, response_mask: as computed by the estimator.
        clip_ratio_low, clip_ratio_high, clip_ratio_c: PPO's clip range and dual clip (verl's keys).
        options: further keys of ``actor.policy_loss_kwargs``, for third-party losses.
    """

    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    response_mask: Tensor
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    clip_ratio_c: float = 3.0
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PolicyLossOutput:
    """Per-token ``losses`` ``[B, T]`` and per-token ``metrics`` (each ``[B, T]``, no gradient).

    Metrics are averaged over the tokens of the mini-batch by whoever calls the loss.
    """

    losses: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


PolicyLoss = Callable[[PolicyLossInputs], PolicyLossOutput]

advantages: Registry[AdvantageEstimator] = Registry("rollcast.advantages", is_callable(1), "algorithm.adv_estimator")
policy_losses: Registry[PolicyLoss] = Registry("rollcast.policy_losses", is_callable(1), "actor.policy_loss")
loss_aggregations: Registry[LossAggregation] = Registry(
    "rollcast.loss_aggregations", is_callable(3), "actor.loss_agg_mode"
)
kl_penalties: Registry[KlPenalty] = Registry(
    "rollcast.kl_penalties", is_callable(2), ("actor.kl_loss_type", "algorithm.kl_penalty")
)
