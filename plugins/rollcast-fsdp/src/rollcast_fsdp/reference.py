"""A second model beside the one in training, for what is measured between their whole distributions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from rollcast.contracts.algorithm import kl_penalties
from rollcast_fsdp.logprobs import response_logits

if TYPE_CHECKING:
    from torch import Tensor

    from rollcast.contracts.engine import ForwardSettings
    from rollcast_engine.batching import MicroBatch
    from rollcast_fsdp.engine import FsdpEngine
    from rollcast_fsdp.step import VocabularyKl

__all__ = ["Reference"]


class Reference:
    """The model of another engine of this process; all ranks use it together."""

    def __init__(self, engine: FsdpEngine) -> None:
        self._engine = engine

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Weights on the device and dropout off, for the calls inside; gradients stay as they are."""
        with self._engine.mode(training=False):
            try:
                yield
            finally:
                if self._engine.sharding is not None:
                    self._engine.sharding.reshard()

    def compare_by(self, name: str, settings: ForwardSettings) -> VocabularyKl:
        """What gives the KL penalty ``name`` for a micro-batch, to be called in place."""
        penalty = kl_penalties.get(name, "actor.kl_loss_type")

        def compare(micro: MicroBatch, logits: Tensor) -> Tensor:
            with torch.no_grad():
                length = micro.responses.size(1)
                theirs = response_logits(self._engine.module, micro.model_inputs, length, settings.temperature)
            return penalty(logits, theirs)

        return compare
