"""The vocabulary head of a model, with a switch that passes hidden states through."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

from rollcast_engine.keys import EngineKeyError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["VocabularyHead"]


class VocabularyHead:
    """The last layer of a causal LM; inside :meth:`held_back` the model returns hidden states instead of logits.

    Raises:
        EngineKeyError: the module has no linear head.
    """

    def __init__(self, module: Any) -> None:
        head = module.get_output_embeddings()
        # Exact type: a subclass may compute something else.
        if type(head) is not nn.Linear:
            raise EngineKeyError(
                "use_fused_kernels",
                f"is true, but the vocabulary head of {type(module).__name__} is {type(head).__name__}, "
                "not a plain linear layer; set it to false",
            )
        self._model = type(module).__name__
        self._linear: nn.Linear = head
        self._seen: Tensor | None = None

    @property
    def weight(self) -> Tensor:
        """Weight ``[V, H]``; for a sharded model it is whole only between its forward and its backward."""
        return self._linear.weight

    @property
    def bias(self) -> Tensor | None:
        """Bias ``[V]``, or None."""
        return self._linear.bias

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Make the model return the head's input states as its logits during the block."""
        self._linear.forward = self._pass_through  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            del self._linear.forward
            self._seen = None

    def states(self, logits: Tensor) -> Tensor:
        """Return ``logits`` as hidden states ``[..., H]`` after checking that the model left them unchanged.

        Args:
            logits: output of the model inside :meth:`held_back`.

        Raises:
            EngineKeyError: the model changes its logits after the head.
        """
        if logits is not self._seen:
            raise EngineKeyError(
                "use_fused_kernels",
                f"is true, but {self._model} changes its logits after the vocabulary head "
                "(a soft cap or a scale); set it to false",
            )
        return logits

    def _pass_through(self, states: Tensor) -> Tensor:
        # FSDP2 registers a hook on the model's output, and warns if the output is a view.
        self._seen = states.clone()
        return self._seen
