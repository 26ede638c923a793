"""Random ragged batches for both sides of bench_verl_algorithms.py, and the large batch that is timed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["AGGREGATIONS", "REJECTIONS", "WEIGHTS", "draw_case", "large_batch"]

AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
#: Level, threshold and whether the weights are normalised.
WEIGHTS = (
    ("token", "2.0", False),
    ("sequence", "2.0", False),
    ("token", "0.5_2.0", False),
    ("sequence", "0.5_2.0", False),
    ("token", "2.0", True),
    ("sequence", "2.0", True),
)
#: Rules and thresholds.
REJECTIONS = (
    ("token_k1", "0.7_1.3"),
    ("token_k2", "0.05"),
    ("token_k3", "0.05"),
    ("seq_sum_k1", "0.5_2.0"),
    ("seq_sum_k2", "0.5"),
    ("seq_sum_k3", "0.5"),
    ("seq_mean_k1", "1.1"),
    ("seq_mean_k2", "0.05"),
    ("seq_mean_k3", "0.05"),
    ("seq_max_k2", "0.2"),
    ("seq_max_k3", "0.2"),
    ("token_k1,seq_mean_k3", "0.7_1.3,0.05"),
)


def draw_case(seed: int) -> dict[str, Any]:
    """A batch of 4 to 16 rows and 2 to 24 columns; half of the batches have gaps inside the responses.

    Rewards are multiples of 1/16, so that neither side's sums round: the std of two almost equal scores
    would show the rounding of the one that is less exact, and nothing else.
    """
    generator = torch.Generator().manual_seed(seed)

    def whole(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=generator)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    rows, width = int(whole(4, 16)), int(whole(2, 24))
    dense = torch.arange(width) < whole(1, width, rows, 1)
    dense[0, :2] = True  # a variance needs two tokens
    mask = dense.clone()
    if seed % 2:
        mask[:, 1:] &= torch.rand(rows, width - 1, generator=generator) < 0.8
        mask[0, 1] = True
    old = -3 * torch.rand(rows, width, generator=generator) - 0.05
    size = int(whole(2, 4))
    return {
        "mask": mask.long(),
        "dense": dense.long(),
        "rewards": whole(-32, 32, rows, width) / 16 * (torch.rand(rows, width, generator=generator) < 0.3),
        "values": normal(rows, width),
        "returns": normal(rows, width),
        "groups": whole(0, rows // 3, rows),
        "full_groups": (torch.arange(rows) // size).clamp(max=rows // size - 1),
        "baselines": whole(-32, 32, rows) / 16,
        "components": {"accuracy": whole(0, 8, rows) / 8, "format": whole(0, 1, rows).float()},
        "weights": [2.0, 0.5],
        "sum_pi_squared": (2 * old).exp() + torch.rand(rows, width, generator=generator) * (1 - old.exp()).square(),
        "is_weights": (0.3 * normal(rows, width)).exp(),
        "old": old,
        "new": (old + 0.4 * normal(rows, width)).clamp(max=-1e-3),
        "ref": (old + 0.4 * normal(rows, width)).clamp(max=-1e-3),
        "rollout": (old + 0.2 * normal(rows, width)).clamp(max=-1e-3),
        "advantages": normal(rows, width),
        "logits": normal(rows, width, 11),
        "gamma": float(torch.rand((), generator=generator)),
        "lam": float(torch.rand((), generator=generator)),
        "by_std": bool(whole(0, 1)),
        "clip": [float(x) for x in 0.05 + 0.3 * torch.rand(2, generator=generator)] + [1.5 + float(whole(0, 3))],
        "aggregation": AGGREGATIONS[int(whole(0, 4))],
    }


def large_batch() -> dict[str, Any]:
    """8192 responses of up to 2048 tokens, 8 to a prompt, with a score at the last token."""
    generator = torch.Generator().manual_seed(0)
    rows, width = 8192, 2048
    lengths = torch.randint(1, width + 1, (rows,), generator=generator)
    # Zeros that nobody wrote would all be read from one page of memory.
    rewards = torch.zeros(rows, width).clone()
    rewards[torch.arange(rows), lengths - 1] = torch.randint(0, 17, (rows,), generator=generator) / 16
    return {
        "mask": (torch.arange(width) < lengths.unsqueeze(-1)).long(),
        "rewards": rewards,
        "groups": torch.arange(rows) // 8,
    }
