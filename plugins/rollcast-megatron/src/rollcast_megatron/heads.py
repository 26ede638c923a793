"""Heads of the last stage: from hidden states to log-probs and other per-token quantities, or to values.

Axes: ``b`` rows and ``t`` response positions of a micro-batch, ``n`` tokens under its mask, ``V`` vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rollcast.contracts.algorithm import kl_penalties
from rollcast_megatron.vocab import VocabularySlice, head_quantities

if TYPE_CHECKING:
    from torch import Tensor

    from rollcast.contracts.engine import ForwardSettings
    from rollcast_megatron.build import Plan
    from rollcast_megatron.inputs import Positions
    from rollcast_megatron.module import DecoderModel

__all__ = ["HiddenHead", "LanguageHead", "ValueHead"]


@dataclass(frozen=True)
class ValueHead:
    """Head that returns ``values`` ``[b, t]`` of the states before the response tokens."""

    positions: Positions

    def __call__(self, model: DecoderModel, hidden: Tensor) -> dict[str, Tensor]:
        return self.positions.spread({"values": model.values_at(hidden, self.positions)})


@dataclass(frozen=True)
class HiddenHead:
    """Head that returns the states before the response tokens, ``hidden`` ``[n, h]``, for another head later."""

    positions: Positions

    def __call__(self, model: DecoderModel, hidden: Tensor) -> dict[str, Tensor]:
        return {"hidden": model.hidden_at(hidden, self.positions)}


@dataclass(frozen=True)
class LanguageHead:
    """Head that returns ``log_probs`` ``[b, t]``, and the other quantities that the settings request.

    Attributes:
        positions: the positions to predict from.
        plan: distribution of the model.
        settings: settings of the batch.
        chunk: maximum number of positions whose logits exist at a time.
        reference: the reference model's rows of the vocabulary head and its states, for ``vocabulary_kl``; None without
            a reference.
    """

    positions: Positions
    plan: Plan
    settings: ForwardSettings
    chunk: int
    reference: tuple[Tensor, Tensor] | None = None

    def __call__(self, model: DecoderModel, hidden: Tensor) -> dict[str, Tensor]:
        positions, settings = self.positions, self.settings
        chosen, weight = model.hidden_at(hidden, positions), model.head_weight()
        vocabulary = VocabularySlice(
            group=self.plan.mesh.tensor_group,
            start=self.plan.mesh.tensor_rank * self.plan.rows,
            words=self.plan.own_words,
            scale=1.0 / settings.temperature,
            chunk=self.chunk,
        )
        log_probs, entropy, squares = head_quantities(chosen, weight, positions.targets, vocabulary)
        quantities = {"log_probs": log_probs}
        if settings.calculate_entropy:
            quantities["entropy"] = entropy
        if settings.calculate_sum_pi_squared:
            quantities["sum_pi_squared"] = squares
        if settings.vocabulary_kl is not None:
            quantities["vocabulary_kl"] = self._vocabulary_kl(settings.vocabulary_kl, chosen, weight)
        return positions.spread(quantities)

    def _vocabulary_kl(self, name: str, chosen: Tensor, weight: Tensor) -> Tensor:
        if self.reference is None:
            raise RuntimeError("vocabulary_kl needs a reference, and none is set")
        logits = self._logits(chosen, weight)
        with torch.no_grad():
            their_weight, theirs = self.reference
            their_logits = self._logits(theirs.to(their_weight.device, non_blocking=True), their_weight)
        penalty = kl_penalties.get(name, "actor.kl_loss_type")
        return penalty(logits.unsqueeze(0), their_logits.unsqueeze(0)).squeeze(0)

    def _logits(self, chosen: Tensor, weight: Tensor) -> Tensor:
        """Return logits over the whole vocabulary, float32 ``[n, V]``, on every tensor-parallel rank."""
        from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

        logits = (chosen @ weight.T).float() / self.settings.temperature
        whole: Tensor = gather_from_tensor_model_parallel_region(logits, group=self.plan.mesh.tensor_group)
        return whole[:, : self.plan.map.vocab_size]
