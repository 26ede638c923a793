"""Schema of the config's ``algorithm`` section; importable without torch."""

from __future__ import annotations

from dataclasses import field, replace
from typing import Any

from rollcast.contracts.config import Positive, config

__all__ = ["AlgorithmConfig", "FilterGroupsConfig", "RolloutCorrectionConfig"]


@config
class RolloutCorrectionConfig:
    """Correction for the gap between rollout and training policy. Names are verl's where verl has the key."""

    rollout_is: str | None = "auto"
    """Importance weights per `token` or per `sequence`; null for none. `auto` is `token` if `bypass_mode` is off, and
    rollouts may be older than the step that trains on them (`trainer.max_staleness`) or compute in another precision
    than the actor (`rollout.quantization`, `rollout.dtype`); else none."""
    rollout_is_threshold: Any = 2.0
    """Upper bound of the importance weights (`2.0`, truncation), or both bounds outside which they are zero
    (`[0.5, 5.0]` or `0.5_5.0`, IcePop)."""
    rollout_is_batch_normalize: bool = False
    """Divide the importance weights by their mean over the batch."""
    rollout_rs: str | None = None
    """Rules of rejection, such as `token_k1,seq_mean_k3`; null for none."""
    rollout_rs_threshold: Any = None
    """One threshold for all rules, or one for each, separated by commas."""
    rollout_token_veto_threshold: float | None = None
    """Reject a row that has a token whose probability ratio of training to rollout policy is below this; null for
    none."""
    bypass_mode: bool = False
    """Use the rollout's log-probs as the old ones and skip the pass that computes the latter. Weights and rejection,
    which compare the two, have no effect in such a step."""
    bypass_max_kl: float | None = None
    """Bypass only while the last measured gap is at most this, in nats per token."""
    bypass_check_freq: Positive = 10
    """Largest number of steps between two measurements of the gap, with `bypass_max_kl`."""

    def resolved(self, is_off_policy: bool) -> RolloutCorrectionConfig:
        """Return the config with ``auto`` replaced by its meaning.

        Args:
            is_off_policy: True if tokens may be older than the step that trains on them, or are sampled in another
                precision.
        """
        if self.rollout_is != "auto":
            return self
        return replace(self, rollout_is="token" if is_off_policy and not self.bypass_mode else None)


@config
class FilterGroupsConfig:
    """Dynamic sampling (DAPO, arXiv:2503.14476, §3.2). Names are verl's."""

    enable: bool = False
    """Leave out prompts whose samples all have the same score, and sample further prompts for them."""
    metric: str = "score"
    """Number in which the samples of a group must differ: `score` before a manager shaped it, `shaped_score`,
    `accuracy`, or an extra number of the reward."""
    max_num_gen_batches: Positive = 10
    """Batches of prompts per step, at most; the step then continues with the batches that it has."""


@config
class AlgorithmConfig:
    """Turning rewards into advantages. Names are verl's."""

    adv_estimator: str = "grpo"
    """Registry name of the advantage estimator."""
    gamma: float = 1.0
    """Discount factor."""
    lam: float = 1.0
    """λ of GAE."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide by the group's standard deviation; false for Dr. GRPO."""
    use_kl_in_reward: bool = False
    """Subtract `kl_coef` times the KL penalty from each token's score."""
    kl_penalty: str = "k1"
    """Registry name of the KL penalty in the reward."""
    kl_controller: str = "fixed"
    """Registry name of the controller of the penalty's weight (verl's `kl_ctrl.type`)."""
    kl_coef: float = 0.001
    """Initial weight of the penalty (verl's `kl_ctrl.kl_coef`)."""
    target_kl: float = 0.1
    """Target of an adaptive controller (verl's `kl_ctrl.target_kl`)."""
    horizon: int = 10_000
    """Horizon of an adaptive controller in samples (verl's `kl_ctrl.horizon`)."""
    adv_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further options of the estimator."""
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
    """Correction for the gap between rollout and training policy."""
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    """Dynamic sampling."""
