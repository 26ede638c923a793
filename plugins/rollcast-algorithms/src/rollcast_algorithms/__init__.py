"""The algorithm's pure parts: advantages, policy and value losses, aggregation, KL, rollout correction.

The parts are found by name in rollcast's registries; the names below serve those who call them
directly. They resolve on first use, so importing the package imports no torch. Two parts are called
gpg, the estimator and the loss; they are in :mod:`rollcast_algorithms.advantages` and
:mod:`rollcast_algorithms.policy_losses`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollcast_algorithms.advantages import (
        gae,
        gdpo,
        grpo,
        grpo_passk,
        opo,
        optimal_token_baseline,
        reinforce_plus_plus,
        reinforce_plus_plus_baseline,
        remax,
        rloo,
        tir_optimal_token_baseline,
    )
    from rollcast_algorithms.aggregation import (
        seq_mean_token_mean,
        seq_mean_token_sum,
        seq_mean_token_sum_norm,
        token_mean,
        token_sum,
    )
    from rollcast_algorithms.kl import (
        absolute,
        absolute_plus,
        k1,
        k1_plus,
        k2,
        k2_plus,
        k3,
        k3_plus,
    )
    from rollcast_algorithms.kl_controllers import (
        AdaptiveKlController,
        FixedKlController,
    )
    from rollcast_algorithms.losses import (
        PpoLoss,
        SftLoss,
        make_ppo_loss,
    )
    from rollcast_algorithms.policy_losses import (
        cispo,
        clip_cov,
        dppo_kl,
        dppo_tv,
        dro,
        geo_mean,
        gspo,
        kl_cov,
        sapo,
        topr,
        vanilla,
    )
    from rollcast_algorithms.rollout_correction import (
        RolloutCorrection,
        correct_rollout,
        may_bypass,
        measure_gap,
    )
    from rollcast_algorithms.schemas import (
        AlgorithmConfig,
        RolloutCorrectionConfig,
    )
    from rollcast_algorithms.value_loss import (
        ValueLoss,
        clipped_value_loss,
    )
    from rollcast_algorithms.vocabulary import (
        entropy,
        full,
        sum_pi_squared,
    )

_EXPORTS = {
    "AdaptiveKlController": "rollcast_algorithms.kl_controllers",
    "AlgorithmConfig": "rollcast_algorithms.schemas",
    "FixedKlController": "rollcast_algorithms.kl_controllers",
    "PpoLoss": "rollcast_algorithms.losses",
    "RolloutCorrection": "rollcast_algorithms.rollout_correction",
    "RolloutCorrectionConfig": "rollcast_algorithms.schemas",
    "SftLoss": "rollcast_algorithms.losses",
    "ValueLoss": "rollcast_algorithms.value_loss",
    "absolute": "rollcast_algorithms.kl",
    "absolute_plus": "rollcast_algorithms.kl",
    "cispo": "rollcast_algorithms.policy_losses",
    "clip_cov": "rollcast_algorithms.policy_losses",
    "clipped_value_loss": "rollcast_algorithms.value_loss",
    "correct_rollout": "rollcast_algorithms.rollout_correction",
    "dppo_kl": "rollcast_algorithms.policy_losses",
    "dppo_tv": "rollcast_algorithms.policy_losses",
    "dro": "rollcast_algorithms.policy_losses",
    "entropy": "rollcast_algorithms.vocabulary",
    "full": "rollcast_algorithms.vocabulary",
    "gae": "rollcast_algorithms.advantages",
    "gdpo": "rollcast_algorithms.advantages",
    "geo_mean": "rollcast_algorithms.policy_losses",
    "grpo": "rollcast_algorithms.advantages",
    "grpo_passk": "rollcast_algorithms.advantages",
    "gspo": "rollcast_algorithms.policy_losses",
    "k1": "rollcast_algorithms.kl",
    "k1_plus": "rollcast_algorithms.kl",
    "k2": "rollcast_algorithms.kl",
    "k2_plus": "rollcast_algorithms.kl",
    "k3": "rollcast_algorithms.kl",
    "k3_plus": "rollcast_algorithms.kl",
    "kl_cov": "rollcast_algorithms.policy_losses",
    "make_ppo_loss": "rollcast_algorithms.losses",
    "may_bypass": "rollcast_algorithms.rollout_correction",
    "measure_gap": "rollcast_algorithms.rollout_correction",
    "opo": "rollcast_algorithms.advantages",
    "optimal_token_baseline": "rollcast_algorithms.advantages",
    "reinforce_plus_plus": "rollcast_algorithms.advantages",
    "reinforce_plus_plus_baseline": "rollcast_algorithms.advantages",
    "remax": "rollcast_algorithms.advantages",
    "rloo": "rollcast_algorithms.advantages",
    "sapo": "rollcast_algorithms.policy_losses",
    "seq_mean_token_mean": "rollcast_algorithms.aggregation",
    "seq_mean_token_sum": "rollcast_algorithms.aggregation",
    "seq_mean_token_sum_norm": "rollcast_algorithms.aggregation",
    "sum_pi_squared": "rollcast_algorithms.vocabulary",
    "tir_optimal_token_baseline": "rollcast_algorithms.advantages",
    "token_mean": "rollcast_algorithms.aggregation",
    "token_sum": "rollcast_algorithms.aggregation",
    "topr": "rollcast_algorithms.policy_losses",
    "vanilla": "rollcast_algorithms.policy_losses",
}

__all__ = [
    "AdaptiveKlController",
    "AlgorithmConfig",
    "FixedKlController",
    "PpoLoss",
    "RolloutCorrection",
    "RolloutCorrectionConfig",
    "SftLoss",
    "ValueLoss",
    "absolute",
    "absolute_plus",
    "cispo",
    "clip_cov",
    "clipped_value_loss",
    "correct_rollout",
    "dppo_kl",
    "dppo_tv",
    "dro",
    "entropy",
    "full",
    "gae",
    "gdpo",
    "geo_mean",
    "grpo",
    "grpo_passk",
    "gspo",
    "k1",
    "k1_plus",
    "k2",
    "k2_plus",
    "k3",
    "k3_plus",
    "kl_cov",
    "make_ppo_loss",
    "may_bypass",
    "measure_gap",
    "opo",
    "optimal_token_baseline",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "rloo",
    "sapo",
    "seq_mean_token_mean",
    "seq_mean_token_sum",
    "seq_mean_token_sum_norm",
    "sum_pi_squared",
    "tir_optimal_token_baseline",
    "token_mean",
    "token_sum",
    "topr",
    "vanilla",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
