"""Pure functions of the algorithms: advantages, policy and value losses, aggregations, KL, rollout correction.

Runs find these functions by name in rollcast's registries; the names below are for direct calls. They are imported on
first use, so importing the package does not import torch. Both an estimator and a loss are called gpg; import them from
:mod:`rollcast_algorithms.advantages` and :mod:`rollcast_algorithms.policy_losses`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollcast import lazy_exports

if TYPE_CHECKING:
    from rollcast_algorithms.advantages import gae as gae
    from rollcast_algorithms.advantages import gae_turn as gae_turn
    from rollcast_algorithms.advantages import gdpo as gdpo
    from rollcast_algorithms.advantages import gigpo as gigpo
    from rollcast_algorithms.advantages import grpo as grpo
    from rollcast_algorithms.advantages import grpo_passk as grpo_passk
    from rollcast_algorithms.advantages import maxrl as maxrl
    from rollcast_algorithms.advantages import opo as opo
    from rollcast_algorithms.advantages import optimal_token_baseline as optimal_token_baseline
    from rollcast_algorithms.advantages import reinforce_plus_plus as reinforce_plus_plus
    from rollcast_algorithms.advantages import reinforce_plus_plus_baseline as reinforce_plus_plus_baseline
    from rollcast_algorithms.advantages import remax as remax
    from rollcast_algorithms.advantages import rloo as rloo
    from rollcast_algorithms.advantages import tir_optimal_token_baseline as tir_optimal_token_baseline
    from rollcast_algorithms.aggregation import seq_mean_token_mean as seq_mean_token_mean
    from rollcast_algorithms.aggregation import seq_mean_token_sum as seq_mean_token_sum
    from rollcast_algorithms.aggregation import seq_mean_token_sum_norm as seq_mean_token_sum_norm
    from rollcast_algorithms.aggregation import token_mean as token_mean
    from rollcast_algorithms.aggregation import token_sum as token_sum
    from rollcast_algorithms.kl import absolute as absolute
    from rollcast_algorithms.kl import absolute_plus as absolute_plus
    from rollcast_algorithms.kl import k1 as k1
    from rollcast_algorithms.kl import k1_plus as k1_plus
    from rollcast_algorithms.kl import k2 as k2
    from rollcast_algorithms.kl import k2_plus as k2_plus
    from rollcast_algorithms.kl import k3 as k3
    from rollcast_algorithms.kl import k3_plus as k3_plus
    from rollcast_algorithms.kl_controllers import AdaptiveKlController as AdaptiveKlController
    from rollcast_algorithms.kl_controllers import FixedKlController as FixedKlController
    from rollcast_algorithms.losses import PpoLoss as PpoLoss
    from rollcast_algorithms.losses import SftLoss as SftLoss
    from rollcast_algorithms.losses import make_ppo_loss as make_ppo_loss
    from rollcast_algorithms.policy_losses import cispo as cispo
    from rollcast_algorithms.policy_losses import clip_cov as clip_cov
    from rollcast_algorithms.policy_losses import dppo_kl as dppo_kl
    from rollcast_algorithms.policy_losses import dppo_tv as dppo_tv
    from rollcast_algorithms.policy_losses import dro as dro
    from rollcast_algorithms.policy_losses import geo_mean as geo_mean
    from rollcast_algorithms.policy_losses import gspo as gspo
    from rollcast_algorithms.policy_losses import icepop as icepop
    from rollcast_algorithms.policy_losses import kl_cov as kl_cov
    from rollcast_algorithms.policy_losses import sapo as sapo
    from rollcast_algorithms.policy_losses import topr as topr
    from rollcast_algorithms.policy_losses import vanilla as vanilla
    from rollcast_algorithms.policy_losses import vespo as vespo
    from rollcast_algorithms.rollout_correction import RolloutCorrection as RolloutCorrection
    from rollcast_algorithms.rollout_correction import correct_rollout as correct_rollout
    from rollcast_algorithms.rollout_correction import may_bypass as may_bypass
    from rollcast_algorithms.rollout_correction import measure_gap as measure_gap
    from rollcast_algorithms.schemas import AlgorithmConfig as AlgorithmConfig
    from rollcast_algorithms.schemas import RolloutCorrectionConfig as RolloutCorrectionConfig
    from rollcast_algorithms.value_loss import ValueLoss as ValueLoss
    from rollcast_algorithms.value_loss import clipped_value_loss as clipped_value_loss
    from rollcast_algorithms.vocabulary import entropy as entropy
    from rollcast_algorithms.vocabulary import full as full
    from rollcast_algorithms.vocabulary import sum_pi_squared as sum_pi_squared

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "advantages": [
            "gae",
            "gae_turn",
            "gdpo",
            "gigpo",
            "grpo",
            "grpo_passk",
            "maxrl",
            "opo",
            "optimal_token_baseline",
            "reinforce_plus_plus",
            "reinforce_plus_plus_baseline",
            "remax",
            "rloo",
            "tir_optimal_token_baseline",
        ],
        "aggregation": [
            "seq_mean_token_mean",
            "seq_mean_token_sum",
            "seq_mean_token_sum_norm",
            "token_mean",
            "token_sum",
        ],
        "kl": ["absolute", "absolute_plus", "k1", "k1_plus", "k2", "k2_plus", "k3", "k3_plus"],
        "kl_controllers": ["AdaptiveKlController", "FixedKlController"],
        "losses": ["PpoLoss", "SftLoss", "make_ppo_loss"],
        "policy_losses": [
            "cispo",
            "clip_cov",
            "dppo_kl",
            "dppo_tv",
            "dro",
            "geo_mean",
            "gspo",
            "icepop",
            "kl_cov",
            "sapo",
            "topr",
            "vanilla",
            "vespo",
        ],
        "rollout_correction": ["RolloutCorrection", "correct_rollout", "may_bypass", "measure_gap"],
        "schemas": ["AlgorithmConfig", "RolloutCorrectionConfig"],
        "value_loss": ["ValueLoss", "clipped_value_loss"],
        "vocabulary": ["entropy", "full", "sum_pi_squared"],
    },
)
