"""Parts that the tests of replicas and weight syncs share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rollcast.contracts.weights import WeightReport, WeightTally
from rollcast_serving.server import IncomingWeights


class ListEngine:
    """As much of an engine as a weight sync needs: named tensors."""

    def __init__(self, named: Iterable[tuple[str, Tensor]]) -> None:
        self.named = list(named)
        self.gathered = 0

    def get_per_tensor_param(self) -> Iterator[tuple[str, Tensor]]:
        for entry in self.named:
            self.gathered += 1
            yield entry


class KeepingTarget:
    """A replica that keeps copies of what comes.

    Args:
        drop: names that get lost inside it.
    """

    node = "127.0.0.1"

    def __init__(self, drop: Sequence[str] = ()) -> None:
        self.drop = drop
        self.held: dict[str, Tensor] = {}
        self.largest = 0

    def receive_weights(self, sync: str, source: Mapping[str, Any], version: int) -> WeightReport:
        tally = WeightTally(IncomingWeights(sync, source))
        for bucket in tally:
            self.largest = max(self.largest, sum(tensor.numel() * tensor.element_size() for _, tensor in bucket))
            for name, tensor in bucket:
                self.held[name] = tensor.clone()
        return tally.report(version)


def many_tensors(seed: int = 0) -> list[tuple[str, Tensor]]:
    """Tensors of many dtypes and shapes, an empty one and a scalar among them."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(64, 32), (7,), (), (0, 3), (1000, 33), (5, 5, 5), (3,)]
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float32, torch.float32, torch.int64, torch.uint8]
    return [
        (f"layer.{number}.weight", (torch.rand(shape, generator=generator) * 100).to(dtype))
        for number, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    ]
