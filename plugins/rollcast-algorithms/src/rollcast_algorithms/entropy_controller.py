"""The controller of an adaptive weight of the entropy bonus."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["AdaptiveEntropyController"]


@dataclass
class AdaptiveEntropyController:
    """A controller that raises the weight of the entropy bonus while the entropy is low, and lowers it otherwise.

    With H the mean entropy of a token in the last step::

        weight = coefficient where H ≤ target, 0 elsewhere and before the first step
        coefficient ← clamp(coefficient ± delta, minimum, maximum)    + where H ≤ target, - elsewhere

    Source: He et al. 2025, Skywork Open Reasoner 1 Technical Report, arXiv:2505.22312; TRL's ``use_adaptive_entropy``.

    Attributes:
        coefficient: current coefficient.
        target: entropy in nats per token below which the bonus acts.
        delta: change of the coefficient in each step.
        minimum, maximum: bounds of the coefficient.
        last_entropy: H; infinite before the first step.
    """

    coefficient: float
    target: float
    delta: float
    minimum: float
    maximum: float
    last_entropy: float = float("inf")

    @property
    def weight(self) -> float:
        """Weight of the bonus in the next step."""
        return self.coefficient if self.last_entropy <= self.target else 0.0

    def update(self, entropy: float) -> None:
        """Adjust the coefficient after a step with the mean entropy ``entropy``, in nats per token.

        An entropy that is not finite, which a broken step has, changes nothing.
        """
        if not math.isfinite(entropy):
            return
        self.last_entropy = entropy
        if entropy <= self.target:
            self.coefficient = min(self.coefficient + self.delta, self.maximum)
        else:
            self.coefficient = max(self.coefficient - self.delta, self.minimum)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for :meth:`load_state_dict`, as JSON-compatible values."""
        seen = self.last_entropy if self.last_entropy < float("inf") else None
        return {"coefficient": self.coefficient, "last_entropy": seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore state returned by :meth:`state_dict`."""
        self.coefficient = float(state["coefficient"])
        self.last_entropy = float("inf") if state["last_entropy"] is None else float(state["last_entropy"])
