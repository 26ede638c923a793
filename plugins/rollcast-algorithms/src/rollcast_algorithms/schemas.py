"""The config's ``algorithm`` section; importable without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["AlgorithmConfig"]


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
        kl_coef: its weight (verl's ``kl_ctrl.kl_coef``).
        adv_kwargs: further keys for a third-party estimator, given to it as ``options``.
    """

    adv_estimator: str = "grpo"
    gamma: float = 1.0
    lam: float = 1.0
    norm_adv_by_std_in_grpo: bool = True
    use_kl_in_reward: bool = False
    kl_penalty: str = "k1"
    kl_coef: float = 0.001
    adv_kwargs: dict[str, Any] = field(default_factory=dict)
