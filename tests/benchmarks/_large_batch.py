"""The batch of the controller's benchmarks, without any framework: 117 MB, as a PPO step of 1024 samples has it."""

from __future__ import annotations

import numpy as np
import torch

__all__ = ["ROWS", "columns", "uids"]

ROWS = 1024
_LENGTH = 4096


def columns() -> dict[str, torch.Tensor]:
    """Ids, mask and positions (int64) and log-probs (float32), each ``[1024, 4096]``."""
    torch.manual_seed(0)
    shape = (ROWS, _LENGTH)
    return {
        "input_ids": torch.randint(0, 50_000, shape),
        "attention_mask": torch.ones(shape, dtype=torch.int64),
        "position_ids": torch.arange(_LENGTH).repeat(ROWS, 1),
        "old_log_probs": torch.randn(shape),
    }


def uids() -> np.ndarray:
    """A string a row."""
    return np.array([f"sample-{row}" for row in range(ROWS)], dtype=object)
