"""Micro-batch plans."""

from __future__ import annotations

import torch

from rollcast.contracts.engine import ForwardSettings
from rollcast.testing.tiny import random_batch
from rollcast_engine.batching import plan_batch, tensor_columns


def test_a_token_budget_bounds_padded_tokens() -> None:
    batch = random_batch(40, 12, 20, seed=4)
    plan = plan_batch(tensor_columns(batch), ForwardSettings(max_token_len_per_gpu=70))
    parts = [plan.micro_batch(index, torch.device("cpu")) for index in range(len(plan))]
    assert max(part.model_inputs["input_ids"].numel() for part in parts) <= 70
    assert sorted(torch.cat([part.rows for part in parts]).tolist()) == list(range(40))
    assert len(parts) <= 16  # 40 rows of 17 tokens on average
    for part in parts:
        ids, mask = part.model_inputs["input_ids"], part.model_inputs["attention_mask"]
        assert mask[:, 0].any()
        assert mask[:, -1].any()
        kept = batch["input_ids"][part.rows][batch["attention_mask"][part.rows] > 0]
        assert torch.equal(ids[mask > 0], kept)
        assert torch.equal(part.columns["prompts"], ids[:, : -part.responses.size(1)])
