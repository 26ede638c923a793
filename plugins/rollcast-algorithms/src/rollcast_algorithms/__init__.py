"""The algorithm's pure parts: advantages, policy losses, loss aggregation and KL penalties.

The parts are found by name in rollcast's registries; the names below serve those who call them
directly. They resolve on first use, so importing the package imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollcast_algorithms.advantages import gae, grpo
    from rollcast_algorithms.aggregation import (
        seq_mean_token_mean,
        seq_mean_token_sum,
        seq_mean_token_sum_norm,
        token_mean,
        token_sum,
    )
    from rollcast_algorithms.kl import k1, k2, k3
    from rollcast_algorithms.losses import PpoLoss, SftLoss, make_ppo_loss
    from rollcast_algorithms.policy_losses import vanilla
    from rollcast_algorithms.schemas import AlgorithmConfig

_EXPORTS = {
    "AlgorithmConfig": "rollcast_algorithms.schemas",
    "PpoLoss": "rollcast_algorithms.losses",
    "SftLoss": "rollcast_algorithms.losses",
    "gae": "rollcast_algorithms.advantages",
    "grpo": "rollcast_algorithms.advantages",
    "k1": "rollcast_algorithms.kl",
    "k2": "rollcast_algorithms.kl",
    "k3": "rollcast_algorithms.kl",
    "make_ppo_loss": "rollcast_algorithms.losses",
    "seq_mean_token_mean": "rollcast_algorithms.aggregation",
    "seq_mean_token_sum": "rollcast_algorithms.aggregation",
    "seq_mean_token_sum_norm": "rollcast_algorithms.aggregation",
    "token_mean": "rollcast_algorithms.aggregation",
    "token_sum": "rollcast_algorithms.aggregation",
    "vanilla": "rollcast_algorithms.policy_losses",
}

__all__ = [
    "AlgorithmConfig",
    "PpoLoss",
    "SftLoss",
    "gae",
    "grpo",
    "k1",
    "k2",
    "k3",
    "make_ppo_loss",
    "seq_mean_token_mean",
    "seq_mean_token_sum",
    "seq_mean_token_sum_norm",
    "token_mean",
    "token_sum",
    "vanilla",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
