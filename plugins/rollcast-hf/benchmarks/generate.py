"""Measures new tokens per CPU second of the hf rollout, with one thread, on a model of 0.54 M parameters."""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import tempfile
import time

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from rollcast.contracts.rollout import RolloutRequest, RolloutSetup, SamplingParams
from rollcast_hf.rollout import HfRollout
from rollcast_hf.schemas import HfRolloutConfig

#: label, distinct prompts, shortest and longest prompt, new tokens, sequences per prompt
CASES = (
    ("256 prompts of 9 tokens, 16 new", 256, 9, 9, 16, 1),
    ("256 prompts of 5 to 20 tokens, 16 new", 256, 5, 20, 16, 1),
    ("64 prompts of 9 tokens, n=8, 10 new", 64, 9, 9, 10, 8),
)


def main(repeats: int = 9) -> None:
    """Write one line per case: the median of some repeats."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=83,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=512,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        Qwen2ForCausalLM(config).save_pretrained(folder)
        rollout = HfRollout(RolloutSetup(HfRolloutConfig(), folder, seed=0, pad_token_id=0, eos_token_id=2))
        for label, count, low, high, new, n in CASES:
            rng = random.Random(0)
            prompts = [[rng.randrange(3, 83) for _ in range(rng.randint(low, high))] for _ in range(count)]
            sampling = SamplingParams(max_tokens=new, n=n, ignore_eos=True)
            _run(rollout, prompts, sampling)
            seconds = statistics.median(_run(rollout, prompts, sampling) for _ in range(repeats))
            sys.stdout.write(f"| {label} | {count * n * new / seconds:,.0f} |\n")


def _run(rollout: HfRollout, prompts: list[list[int]], sampling: SamplingParams) -> float:
    async def gather() -> None:
        requests = [RolloutRequest(str(i), prompt, sampling) for i, prompt in enumerate(prompts)]
        await asyncio.gather(*map(rollout.generate, requests))

    start = time.process_time()
    asyncio.run(gather())
    return time.process_time() - start


if __name__ == "__main__":
    main()
