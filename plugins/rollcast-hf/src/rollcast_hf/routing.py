"""The choices of a mixture's routers during decoding, taken from transformers' modules by hooks.

Axes: ``U`` distinct prompts of ``P`` left-padded positions, ``B`` rows, ``L`` layers with experts, ``k`` experts of a
token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rollcast.errors import CapabilityError

__all__ = ["RoutingRecorder"]

#: Attributes of a router; in transformers 4 the block with the experts has the sizes too, and no weight of its own.
_ATTRIBUTES = ("top_k", "num_experts", "norm_topk_prob", "weight")


class RoutingRecorder:
    """A record of the routers' choices for the rows of one batch.

    Args:
        prompts: tokens of each row's prompt.
    """

    def __init__(self, prompts: Sequence[int]) -> None:
        self._lengths = list(prompts)
        self._prefill: Tensor | None = None
        self._steps: list[Tensor] = []
        self._layers: list[Tensor] = []
        self._routers: list[nn.Module] = []

    @contextmanager
    def listening(self, module: nn.Module) -> Iterator[None]:
        """Listen to the module's routers during a forward pass; every pass is that of the same module.

        Raises:
            CapabilityError: the module has none as in Qwen3-MoE of transformers 5.
        """
        if not self._routers:  # found once, not for every token
            self._routers = [layer for layer in module.modules() if all(hasattr(layer, name) for name in _ATTRIBUTES)]
        if not self._routers:
            raise CapabilityError(
                "rollout.enable_rollout_routing_replay is true, but the model has no routers whose choices can be "
                "recorded: it needs a mixture of experts such as Qwen3-MoE, and transformers 5; set it to false"
            )
        self._layers = []
        handles = [router.register_forward_hook(self._take) for router in self._routers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _take(self, _router: nn.Module, _inputs: Any, output: tuple[Tensor, ...]) -> None:
        self._layers.append(output[2].to(torch.int16))

    def keep_prompts(self, source: Tensor) -> None:
        """Keep the last pass as that of the prompts, of which each row has the one at its place in ``source``."""
        count = int(source.max()) + 1
        self._prefill = torch.stack(self._layers, 1).view(count, -1, len(self._layers), self._layers[0].size(1))[source]

    def keep_step(self, rows: Tensor, count: int) -> None:
        """Keep the last pass as that of one token of each of ``rows``, among ``count``."""
        chosen = torch.stack(self._layers, 1)
        spread = chosen.new_full((count, *chosen.shape[1:]), -1)
        spread[rows] = chosen
        self._steps.append(spread)

    def results(self, ends: Sequence[int]) -> list[NDArray[np.int16]]:
        """Return the choices ``[prompt + new tokens, L, k]`` of each row, with ``ends`` new tokens."""
        if self._prefill is None:
            raise RuntimeError("no pass was recorded")
        prefill = self._prefill.cpu()
        steps = torch.stack(self._steps or [torch.full_like(self._prefill[:, 0], -1)]).cpu()
        routes = []
        for row, (length, end) in enumerate(zip(self._lengths, ends, strict=True)):
            read = steps[: max(end - 1, 0), row]
            last = steps.new_full((end - len(read), *read.shape[1:]), -1)
            routes.append(torch.cat([prefill[row, prefill.size(1) - length :], read, last]).numpy())
        return routes
