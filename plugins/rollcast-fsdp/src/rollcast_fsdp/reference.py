"""A second model beside the one in training, for what is measured between their whole distributions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from rollcast_engine.batching import MicroBatch
    from rollcast_fsdp.engine import FsdpEngine
    from rollcast_fsdp.lora import Adapter
    from rollcast_fsdp.step import Scored

__all__ = ["BaseModelReference", "Reference"]


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

    def score(self, micro: MicroBatch, temperature: float) -> Scored:
        """One forward without gradient, to be called in place."""
        with torch.no_grad(), self._computing():
            return self._engine.forward.score(micro, temperature)

    def _computing(self) -> AbstractContextManager[None]:
        """Around each forward pass of the reference."""
        return nullcontext()


class BaseModelReference(Reference):
    """The engine's own model without its adapter."""

    def __init__(self, engine: FsdpEngine, adapter: Adapter) -> None:
        super().__init__(engine)
        self._adapter = adapter

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Nothing: the model is in place, for it is in training."""
        yield

    @contextmanager
    def _computing(self) -> Iterator[None]:
        module = self._engine.module
        was_training = module.training
        module.eval()
        try:
            with self._adapter.disabled():
                yield
        finally:
            module.train(was_training)
