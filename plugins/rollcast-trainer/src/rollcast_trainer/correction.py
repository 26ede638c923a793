"""The correction for the gap between the policy that sampled and the one that is trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollcast.errors import ConfigError
from rollcast.protocol import DataProto
from rollcast_algorithms.rollout_correction import correct_rollout, may_bypass
from rollcast_algorithms.schemas import RolloutCorrectionConfig

__all__ = ["OffPolicyCorrection"]

_KEPT = "kept_mask"


class OffPolicyCorrection:
    """Weights and rejection by the log-probs of rollout and engine, and the steps that do without.

    Whether a step does without depends on the last gap that it saw, which is part of a checkpoint.
    """

    def __init__(self, config: RolloutCorrectionConfig) -> None:
        self._config = config
        self._last_gap: float | None = None
        self._steps_since = 0

    @property
    def gives_weights(self) -> bool:
        """Whether there is a column ``rollout_is_weights``."""
        return self._config.rollout_is is not None

    @property
    def _acts(self) -> bool:
        config = self._config
        asked = (config.rollout_is, config.rollout_rs, config.rollout_token_veto_threshold)
        return config.bypass_mode or any(value is not None for value in asked)

    def state_dict(self) -> dict[str, Any]:
        """The last gap, and the steps since."""
        return {"last_gap": self._last_gap, "steps_since": self._steps_since}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave."""
        self._last_gap, self._steps_since = state["last_gap"], int(state["steps_since"])

    def may_bypass(self) -> bool:
        """Whether this step takes the rollout's log-probs for the old ones."""
        self._steps_since += 1
        return may_bypass(self._config, self._last_gap, self._steps_since)

    def bypass(self, batch: DataProto) -> DataProto:
        """The batch with the rollout's log-probs for the old ones, and so with weights of 1."""
        columns = {"old_log_probs": batch["rollout_log_probs"]}
        if self.gives_weights:
            columns["rollout_is_weights"] = (batch["response_mask"] != 0).float()
        return batch.with_columns(columns)

    def apply(self, batch: DataProto) -> tuple[DataProto, dict[str, float]]:
        """The batch with the columns that the correction gives, and its metrics.

        Raises:
            ConfigError: a key of ``algorithm.rollout_correction`` means nothing.
        """
        if not self._acts:
            return batch, {}
        try:
            found = correct_rollout(
                batch["old_log_probs"], batch["rollout_log_probs"], batch["response_mask"], self._config
            )
        except ValueError as error:
            raise ConfigError(f"algorithm.rollout_correction: {error}") from error
        self._last_gap, self._steps_since = found.metrics["rollout_corr/k3_kl"], 0
        columns = {_KEPT: found.response_mask}
        if found.weights is not None:
            columns["rollout_is_weights"] = found.weights
        return batch.with_columns(columns), dict(found.metrics)

    def mask_rejected(self, batch: DataProto) -> DataProto:
        """The batch for the update: what was rejected is not under its mask any more."""
        return batch.with_columns({"response_mask": batch[_KEPT]}) if _KEPT in batch else batch
