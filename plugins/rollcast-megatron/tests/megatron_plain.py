"""Plain transformers and torch, to compare the engine with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron_scenarios import EVERYTHING, OPTIM
from torch import Tensor

from rollcast_testing.tiny import plain_log_probs, plain_model, plain_weights, random_batch


def train(folder: Path, steps: int = 2) -> dict[str, Any]:
    """What :func:`megatron_scenarios.train` does, with the gradient norm and loss of each step."""
    module = plain_model(folder)
    adamw = torch.optim.AdamW(module.parameters(), lr=OPTIM.lr, eps=OPTIM.eps, weight_decay=OPTIM.weight_decay)
    before = _quantities(module)
    history = []
    for seed in range(steps):
        data = random_batch(8, 6, 8, seed=seed)
        adamw.zero_grad()
        log_probs, _ = plain_log_probs(module, data, EVERYTHING.temperature)
        loss = -log_probs.sum() / data["response_mask"].sum()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), OPTIM.clip_grad)
        adamw.step()
        history.append((float(norm), float(loss.detach())))
    return {"before": before, "history": history, "weights": plain_weights(module)}


def _quantities(module: Any) -> dict[str, Tensor]:
    data = random_batch(8, 6, 8, seed=50)
    with torch.no_grad():
        log_probs, entropy = plain_log_probs(module, data, EVERYTHING.temperature)
    return {"log_probs": log_probs, "entropy": entropy}
