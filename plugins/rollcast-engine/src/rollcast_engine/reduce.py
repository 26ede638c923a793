"""Reductions over data-parallel ranks: counts before a mini-batch and metrics after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rollcast.contracts.algorithm import Denominators

if TYPE_CHECKING:
    from torch import Tensor

    from rollcast.contracts.engine import ForwardSettings
    from rollcast_engine.batching import BatchPlan

__all__ = ["AgreedCounts", "MetricSums", "agree_on_counts"]


@dataclass(frozen=True)
class AgreedCounts:
    """Counts over all ranks.

    Attributes:
        micro_batches: micro-batches that each rank runs.
        denominators: counts that losses divide by.
        longest: tokens of the longest row.
    """

    micro_batches: int
    denominators: Denominators
    longest: int


def agree_on_counts(plan: BatchPlan, settings: ForwardSettings, group: Any, device: torch.device) -> AgreedCounts:
    """Exchange counts in one collective.

    Denominators from the caller are kept. Counted ones are at least 1, so that a mini-batch without any masked-in token
    has loss 0 rather than 0/0.

    Args:
        plan: micro-batches of this rank.
        settings: settings of the pass, which may hold denominators.
        group: process group of the data-parallel ranks; None for a single rank.
        device: device of the collective.
    """
    tokens, sequences = plan.source.counts()
    mine = torch.tensor(
        [tokens, sequences, len(plan), plan.longest, plan.source.response_width], dtype=torch.float64, device=device
    )
    table = mine.unsqueeze(0)
    if group is not None:
        rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(rows, mine, group=group)
        table = torch.stack(rows)
    sums, maxima = table.sum(0).tolist(), table.amax(0).tolist()
    denominators = settings.denominators or Denominators(
        tokens=max(sums[0], 1.0),
        sequences=max(sums[1], 1.0),
        max_tokens=float(settings.max_response_length or maxima[4]),
    )
    return AgreedCounts(int(maxima[2]), denominators, int(maxima[3]))


@dataclass
class MetricSums:
    """Sums and maxima of metrics over micro-batches; kept on the device until :meth:`reduce`."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)

    def add(self, metrics: Mapping[str, Any], maxima: Mapping[str, Any]) -> None:
        """Add one micro-batch's share: scalars, as tensors or numbers."""
        for name, value in metrics.items():
            number = torch.as_tensor(value).detach().double()
            self.sums[name] = self.sums[name] + number if name in self.sums else number
        for name, value in maxima.items():
            number = torch.as_tensor(value).detach().double()
            self.maxima[name] = torch.maximum(self.maxima[name], number) if name in self.maxima else number

    def reduce(self, group: Any) -> dict[str, float]:
        """Return the metrics over all ranks, equal on every rank.

        A rank that saw no rows may lack some names before the reduction.
        """
        mine = (_numbers(self.sums), _numbers(self.maxima))
        everyone: list[Any] = [mine]
        if group is not None:
            everyone = [None] * dist.get_world_size(group)
            dist.all_gather_object(everyone, mine, group=group)
        total: dict[str, float] = {}
        for sums, _ in everyone:
            for name, value in sums.items():
                total[name] = total.get(name, 0.0) + value
        for _, maxima in everyone:
            for name, value in maxima.items():
                total[name] = max(total.get(name, value), value)
        return dict(sorted(total.items()))


def _numbers(metrics: Mapping[str, Tensor]) -> dict[str, float]:
    """Return scalars as numbers, with one copy from the device for all of them."""
    if not metrics:
        return {}
    device = next((value.device for value in metrics.values() if value.device.type != "cpu"), None)
    values = torch.stack([value.to(device) for value in metrics.values()]).tolist()
    return dict(zip(metrics, values, strict=True))
