"""A second model beside the one in training, for what is measured between their whole distributions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from rollcast_engine.batching import MicroBatch
    from rollcast_fsdp.lora import Adapter
    from rollcast_fsdp.sharding import Sharding
    from rollcast_fsdp.step import Scored, TokenForward

__all__ = ["BaseModelReference", "Reference"]


class Reference:
    """The model of another engine of this process; all ranks use it together.

    Args:
        forward: that engine's.
        mode: puts its model in place, in training mode or not.
        sharding: of its model, if there is more than one rank.
    """

    def __init__(
        self, forward: TokenForward, mode: Callable[[bool], AbstractContextManager[None]], sharding: Sharding | None
    ) -> None:
        self._forward = forward
        self._mode = mode
        self._sharding = sharding

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Weights on the device and dropout off, for the calls inside; gradients stay as they are."""
        with self._mode(False):
            try:
                yield
            finally:
                if self._sharding is not None:
                    self._sharding.reshard()

    def score(self, micro: MicroBatch, temperature: float) -> Scored:
        """One forward without gradient, to be called in place."""
        with torch.no_grad():
            return self._forward.score(micro, temperature)


class BaseModelReference:
    """The engine's own model without its adapter."""

    def __init__(self, forward: TokenForward, adapter: Adapter) -> None:
        self._forward = forward
        self._adapter = adapter

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Nothing: the model is in place, for it is in training."""
        yield

    def score(self, micro: MicroBatch, temperature: float) -> Scored:
        """One forward without gradient and dropout."""
        module = self._forward.module
        was_training = module.training
        module.eval()
        try:
            with torch.no_grad(), self._adapter.disabled():
                return self._forward.score(micro, temperature)
        finally:
            module.train(was_training)
