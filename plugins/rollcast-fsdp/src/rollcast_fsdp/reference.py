"""A reference model beside the one in training, to compare their full distributions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from rollcast_engine.lora import Adapter
    from rollcast_fsdp.sharding import Sharding
    from rollcast_fsdp.step import ForwardInputs, Scored, TokenForward

__all__ = ["BaseModelReference", "Reference"]


class Reference:
    """The model of another engine of this process; all ranks use it together.

    Args:
        forward: forward of that engine.
        mode: context manager that enters its train or eval mode.
        sharding: sharding of its model; None on a single rank.
    """

    def __init__(
        self, forward: TokenForward, mode: Callable[[bool], AbstractContextManager[None]], sharding: Sharding | None
    ) -> None:
        self._forward = forward
        self._mode = mode
        self._sharding = sharding

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Keep the weights on the device and dropout off during the block; gradients are left alone."""
        with self._mode(False):
            try:
                yield
            finally:
                if self._sharding is not None:
                    self._sharding.reshard()

    def score(self, inputs: ForwardInputs, temperature: float) -> Scored:
        """Run one forward without gradients; call it inside :meth:`in_place`."""
        with torch.no_grad():
            return self._forward.score(inputs, temperature)


class BaseModelReference:
    """The engine's own model without its adapter."""

    def __init__(self, forward: TokenForward, adapter: Adapter) -> None:
        self._forward = forward
        self._adapter = adapter

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Do nothing: the model in training is on the device already."""
        yield

    def score(self, inputs: ForwardInputs, temperature: float) -> Scored:
        """Run one forward without gradients and dropout."""
        module = self._forward.module
        was_training = module.training
        module.eval()
        try:
            with torch.no_grad(), self._adapter.disabled():
                return self._forward.score(inputs, temperature)
        finally:
            module.train(was_training)
