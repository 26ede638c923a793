"""The choices of a mixture's routers, from an engine that returns those of every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollcast.errors import CapabilityError, RolloutError
from rollcast_serving.model_weights import ModelWeights

__all__ = ["RecordedLayers"]


@dataclass(frozen=True)
class RecordedLayers:
    """Layers whose routers' choices a rollout records.

    Attributes:
        indices: layers with experts, in ascending order.
        total: number of all layers.
    """

    indices: tuple[int, ...]
    total: int

    @classmethod
    def of(cls, model_path: str, model_config: Any, weights: ModelWeights) -> RecordedLayers:
        """Return the layers of a model.

        Args:
            model_path: folder of the model, for messages.
            model_config: its transformers config.
            weights: names of its weights.

        Raises:
            CapabilityError: it has no experts.
        """
        if not weights.expert_layers:
            raise CapabilityError(
                f"rollout.enable_rollout_routing_replay is true, but the model in {model_path} has no layers with "
                "experts; set it to false"
            )
        return cls(weights.expert_layers, int(model_config.get_text_config().num_hidden_layers))

    def select(self, routes: NDArray[Any], count: int, request_id: str) -> NDArray[np.int16]:
        """Return a sequence's ``routed_experts``, int16 ``[count, layers with experts, k]``; -1 for tokens not read.

        Args:
            routes: the engine's choices ``[tokens, all layers, k]``, or the same flat, for the first tokens of prompt
                and sequence; it reads all but the last at least.
            count: number of tokens of prompt and sequence, 2 or more.
            request_id: id of the request, for messages.

        Raises:
            RolloutError: the choices are those of fewer tokens or of other layers.
        """
        tokens = len(routes) if routes.ndim == 3 else count - 1
        if tokens < count - 1 or not routes.size or routes.size % (tokens * self.total):
            raise RolloutError(
                f"request {request_id!r}: the engine returned experts of shape {routes.shape} for {count} tokens; at "
                f"least [{count - 1}, {self.total}, experts of a token] is needed"
            )
        choices = routes.reshape(tokens, self.total, -1)[:count, list(self.indices)]
        padded = np.full((count, *choices.shape[1:]), -1, np.int16)
        padded[: len(choices)] = choices
        return padded
