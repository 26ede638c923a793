"""Bytes that the weight sync ``delta`` writes for a step of AdamW, as a share of the whole model in the rollout's dtype.

    python tests/benchmarks/bench_delta_sync.py

A random model of 26 million weights learns random tokens with gradients clipped to 1, in float32; the rollout holds
bfloat16. What is measured depends on the learning rate and the size of the weights, not on the machine.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from rollcast_serving.casting import WeightCast
from rollcast_serving.contracts.weight_sync import SyncSettings
from rollcast_serving.receiving import WeightTally
from rollcast_serving.syncs.delta import DeltaSync

STEPS = 6
RATES = (1e-7, 1e-6, 1e-5)


class Target:
    node = "127.0.0.1"

    def receive_weights(self, sync: str, source: Any, version: int) -> Any:
        tally = WeightTally(DeltaSync.open(source))
        for _ in tally:
            pass
        return tally.report(version)


class Engine:
    def __init__(self, model: Any) -> None:
        self.model = model

    def get_adapter(self) -> None:
        return None

    def get_per_tensor_param(self) -> Any:
        return ((name, weight.detach()) for name, weight in self.model.named_parameters())


def measure(rate: float) -> list[float]:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=True,
    )
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    sync = DeltaSync(Engine(model), [Target()], SyncSettings(cast=WeightCast("bfloat16")))  # type: ignore[arg-type,list-item]
    shares, whole = [], 0
    for step in range(STEPS + 1):
        asyncio.run(sync.sync(step))
        whole = whole or sync.written_bytes
        shares.append(sync.written_bytes / whole)
        ids = torch.randint(4096, (2, 64))
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return shares[1:]


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for rate in RATES:
        shares = measure(rate)
        told = ", ".join(f"{share:.3f}" for share in shares)
        logging.getLogger(__name__).info("learning rate %g: share of the bytes written after each step: %s", rate, told)


if __name__ == "__main__":
    main()
