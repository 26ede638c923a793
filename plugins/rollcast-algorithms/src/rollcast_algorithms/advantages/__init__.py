"""Advantage estimators, which estimate how much better a token was than expected."""

from rollcast_algorithms._rows import WHITEN_EPSILON
from rollcast_algorithms.advantages.groups import (
    GRPO_EPSILON,
    gdpo,
    gpg,
    grpo,
    grpo_passk,
    maxrl,
    opo,
    reinforce_plus_plus_baseline,
    rloo,
)
from rollcast_algorithms.advantages.returns import gae, reinforce_plus_plus, remax
from rollcast_algorithms.advantages.token_baselines import (
    OTB_EPSILON,
    optimal_token_baseline,
    tir_optimal_token_baseline,
)
from rollcast_algorithms.advantages.turns import gae_turn, gigpo

__all__ = [
    "GRPO_EPSILON",
    "OTB_EPSILON",
    "WHITEN_EPSILON",
    "gae",
    "gae_turn",
    "gdpo",
    "gigpo",
    "gpg",
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
]
