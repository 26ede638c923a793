"""SGLang on a CUDA device: the rollouts' suite, and the memory that a release frees."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from rollcast_testing.cuda import needs_cuda
from rollcast_testing.rollout import RolloutSuite
from rollcast_testing.rollout_tools import GREEDY, all_tokens, load_model, make_prompts, run_prompts

pytest.importorskip("sglang")
pytestmark = needs_cuda


def free_bytes() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


class TestSglangOnCuda(RolloutSuite):
    name = "sglang"
    shared = True
    rollout_config: ClassVar = {"max_running_requests": 64, "max_total_tokens": 1 << 16, "dtype": "float32"}
    lora_config: ClassVar = {"enable_lora": True, "max_lora_rank": 4}
    quantized_config: ClassVar = {"dtype": "bfloat16"}

    @pytest.mark.parametrize("keeps_weights", [True, False])
    def test_a_release_frees_the_cache(self, model_folder: Path, keeps_weights: bool) -> None:
        """At least 95 % of the cache's bytes, computed from the model's shape, are free for the trainer."""
        tokens = 1 << 20
        rollout: Any = self.build_rollout(
            model_folder, max_total_tokens=tokens, enable_weights_cpu_backup=keeps_weights
        )
        try:
            reference = load_model(model_folder)
            config = reference.config
            width = config.num_key_value_heads * config.head_dim
            cache = tokens * config.num_hidden_layers * 2 * width * 4
            before = all_tokens(run_prompts(rollout, make_prompts(4), GREEDY))
            awake = free_bytes()
            asyncio.run(rollout.release())
            assert free_bytes() - awake >= 0.95 * cache
            asyncio.run(rollout.resume())
            if not keeps_weights:
                asyncio.run(rollout.update_weights([list(reference.named_parameters())], 1))
            assert all_tokens(run_prompts(rollout, make_prompts(4), GREEDY)) == before
        finally:
            rollout.close()
