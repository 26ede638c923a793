"""What a loss function is given of a micro-batch, and what it gives back; an example is in ``contracts.engine``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from rollcast.contracts.algorithm import Denominators

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LossFunction", "LossInputs", "LossOutput"]


@dataclass(frozen=True)
class LossInputs:
    """One micro-batch as a loss function sees it; tensors are ``[B, T]`` on the engine's device.

    Attributes:
        log_probs: of the responses' tokens, with gradient; None for a value model.
        entropy: of the policy at each position, if asked for.
        values: of a value model, with gradient.
        response_mask: 1 where the policy chose the token.
        columns: every other tensor column of the batch with these rows, such as ``advantages``.
        denominators: counts over the whole mini-batch on all data-parallel ranks.
        vocabulary_kl: the penalty between policy and reference that was asked for, with gradient.
    """

    log_probs: Tensor | None
    entropy: Tensor | None
    values: Tensor | None
    response_mask: Tensor
    columns: Mapping[str, Tensor]
    denominators: Denominators
    vocabulary_kl: Tensor | None = None


@dataclass(frozen=True)
class LossOutput:
    """A micro-batch's share of the loss, and of the metrics.

    ``metrics`` are scalars that add up over micro-batches and ranks to the metric of the
    mini-batch (divide by the denominators); of ``maxima`` the largest is kept.
    """

    loss: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    maxima: Mapping[str, Tensor] = field(default_factory=dict)


class LossFunction(Protocol):
    """Turns one micro-batch's per-token quantities into its share of the loss."""

    def __call__(self, inputs: LossInputs) -> LossOutput: ...
