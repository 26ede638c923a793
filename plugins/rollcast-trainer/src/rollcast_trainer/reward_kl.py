"""The KL penalty in the reward, and the controller of its weight."""

from __future__ import annotations

import torch

from rollcast.contracts.algorithm import KlControllerSettings, kl_controllers, kl_penalties, needs_vocabulary
from rollcast.errors import CapabilityError
from rollcast.protocol import DataProto
from rollcast_algorithms.schemas import AlgorithmConfig

__all__ = ["RewardKl"]


class RewardKl:
    """Subtracts ``coefficient * penalty`` from each token's score.

    Raises:
        CapabilityError: the penalty needs the whole vocabulary, which is not at hand here.
    """

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        self._penalty = kl_penalties.get(algorithm.kl_penalty, "algorithm.kl_penalty")
        if needs_vocabulary(self._penalty):
            raise CapabilityError(
                f"algorithm.kl_penalty={algorithm.kl_penalty} needs the log-probs of the whole vocabulary; in the "
                "reward only penalties of the sampled tokens can stand, such as k1"
            )
        settings = KlControllerSettings(algorithm.kl_coef, algorithm.target_kl, algorithm.horizon)
        self.controller = kl_controllers.get(algorithm.kl_controller)(settings)

    def subtract(self, scores: torch.Tensor, batch: DataProto) -> tuple[torch.Tensor, dict[str, float]]:
        """The scores ``[B, T]`` less the penalty, and metrics; the controller hears of the KL."""
        inside = batch["response_mask"] != 0
        # Nothing wild may stand under the zeros of the mask.
        old, ref = (batch[name].masked_fill(~inside, 0.0) for name in ("old_log_probs", "ref_log_prob"))
        penalty = self._penalty(old, ref).masked_fill(~inside, 0.0)
        coefficient = self.controller.value
        mean = float(penalty.sum()) / max(float(inside.sum()), 1.0)
        self.controller.update(mean, len(batch))
        return scores - coefficient * penalty, {"actor/reward_kl_penalty": mean, "actor/kl_coef": coefficient}
