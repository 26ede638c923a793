"""The config's ``algorithm`` section; importable without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["AlgorithmConfig", "FilterGroupsConfig", "RolloutCorrectionConfig"]


@dataclass
class RolloutCorrectionConfig:
    """Correction for the gap between rollout and training policy. Names are verl's where it has one.

    Attributes:
        rollout_is: importance weights per ``token`` or per ``sequence``; empty for none.
        rollout_is_threshold: their upper bound (``2.0``, truncation), or both bounds outside which
            they are zero (``[0.5, 5.0]`` or ``0.5_5.0``, IcePop).
        rollout_is_batch_normalize: divide them by their mean over the batch.
        rollout_rs: rules of rejection, such as ``token_k1,seq_mean_k3``; empty for none.
        rollout_rs_threshold: one threshold for all rules, or one for each, separated by commas.
        rollout_token_veto_threshold: reject a row with a token whose probability ratio of training to
            rollout policy is below this; empty for none.
        bypass_mode: take the rollout's log-probs for the old ones and save that pass; weights and
            rejection, which compare the two, have no effect in such a step.
        bypass_max_kl: only while the gap that was last measured is at most this, in nats per token.
        bypass_check_freq: with ``bypass_max_kl``, measure it at least every so many steps.
    """

    rollout_is: str | None = None
    rollout_is_threshold: Any = 2.0
    rollout_is_batch_normalize: bool = False
    rollout_rs: str | None = None
    rollout_rs_threshold: Any = None
    rollout_token_veto_threshold: float | None = None
    bypass_mode: bool = False
    bypass_max_kl: float | None = None
    bypass_check_freq: int = 10


@dataclass
class FilterGroupsConfig:
    """Dynamic sampling (DAPO, arXiv:2503.14476, §3.2). Names are verl's.

    Attributes:
        enable: leave out prompts whose samples all have the same score, and sample further prompts for them.
        metric: number that the samples of a group must differ in: ``score`` before a manager shaped it,
            ``shaped_score``, ``accuracy``, or an extra number of the reward.
        max_num_gen_batches: batches of prompts a step at most; the step then goes on with what it has.
    """

    enable: bool = False
    metric: str = "score"
    max_num_gen_batches: int = 10


@dataclass
class AlgorithmConfig:
    """How rewards become advantages. Names are verl's.

    Attributes:
        adv_estimator: name in ``rollcast.advantages``.
        gamma: discount.
        lam: GAE's λ.
        norm_adv_by_std_in_grpo: divide by the group's standard deviation; false is Dr. GRPO.
        use_kl_in_reward: subtract ``kl_coef`` times the KL penalty from each token's score.
        kl_penalty: name in ``rollcast.kl_penalties``, of the penalty in the reward.
        kl_controller: name in ``rollcast.kl_controllers``, of what sets its weight (verl's
            ``kl_ctrl.type``).
        kl_coef: the first weight (verl's ``kl_ctrl.kl_coef``).
        target_kl, horizon: of an adaptive controller (verl's ``kl_ctrl.target_kl`` and ``.horizon``).
        adv_kwargs: options of the estimator.
        rollout_correction: for the gap between the sampling and the training policy.
        filter_groups: dynamic sampling.
    """

    adv_estimator: str = "grpo"
    gamma: float = 1.0
    lam: float = 1.0
    norm_adv_by_std_in_grpo: bool = True
    use_kl_in_reward: bool = False
    kl_penalty: str = "k1"
    kl_controller: str = "fixed"
    kl_coef: float = 0.001
    target_kl: float = 0.1
    horizon: int = 10_000
    adv_kwargs: dict[str, Any] = field(default_factory=dict)
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
