"""The vocabulary head, made to pass hidden states through."""

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
    """A causal LM's last layer; inside :meth:`held_back` the model gives hidden states in place of logits.

    Raises:
        EngineKeyError: the module has no linear head.
    """

    def __init__(self, module: Any) -> None:
        head = module.get_output_embeddings()
        # A subclass may compute something else.
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
        """``[V, H]``; of a sharded model the whole, between its forward and its backward."""
        return self._linear.weight

    @property
    def bias(self) -> Tensor | None:
        """``[V]``, or None."""
        return self._linear.bias

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """The model's logits are the states that the head would have got, for the calls inside."""
        self._linear.forward = self._pass_through  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            del self._linear.forward
            self._seen = None

    def states(self, logits: Tensor) -> Tensor:
        """``logits`` as the model gave them inside :meth:`held_back`, ``[..., H]``.

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
        # FSDP2 hangs a hook on what the model gives, and warns of a view.
        self._seen = states.clone()
        return self._seen
