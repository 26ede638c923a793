"""vLLM on a CUDA device: the rollouts' suite, and the memory that each sleep level frees."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from vllm_tools import build, kill

from rollcast.contracts.rollout import RolloutRequest, SamplingParams
from rollcast.errors import WeightSyncError
from rollcast_testing.cuda import needs_cuda
from rollcast_testing.rollout import RolloutSuite
from rollcast_testing.rollout_tools import (
    GREEDY,
    all_tokens,
    generate_all,
    load_model,
    make_prompts,
    run_prompts,
    write_model,
)
from rollcast_testing.tiny_vision import (
    IMAGE_ID,
    image_log_probs,
    load_vision_model,
    noise_image,
    tiny_vision_folder,
    vision_prompt,
)
from rollcast_vllm.rollout import VllmRollout

pytest.importorskip("vllm")
pytestmark = needs_cuda

CACHE = 2 << 30


class TestVllmOnCuda(RolloutSuite):
    name = "vllm"
    shared = True
    rollout_config: ClassVar = {"kv_cache_memory_bytes": 64 << 20, "dtype": "float32"}
    lora_config: ClassVar = {"enable_lora": True, "max_lora_rank": 8}
    quantized_config: ClassVar = {"dtype": "auto"}
    kill_engine = staticmethod(kill)


def free_bytes() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


@pytest.fixture(params=[1, 2])
def level(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def sleeper(level: int, tmp_path: Path) -> Iterator[VllmRollout]:
    rollout = build(write_model(tmp_path / "model", seed=0), kv_cache_memory_bytes=CACHE, sleep_level=level)
    yield rollout
    rollout.close()


def test_sleeping_frees_the_cache_and_the_weights(sleeper: VllmRollout, level: int, tmp_path: Path) -> None:
    """At least 95 % of the cache is free for the trainer; level 2 waits for new weights after it has woken up."""
    prompts = make_prompts(4)
    before = all_tokens(run_prompts(sleeper, prompts, GREEDY))
    awake = free_bytes()
    asyncio.run(sleeper.release())
    asleep = free_bytes()
    assert asleep - awake >= 0.95 * CACHE, f"{(asleep - awake) / 1e9:.2f} GB of {CACHE / 1e9:.2f} GB"
    asyncio.run(sleeper.resume())
    assert abs(free_bytes() - awake) <= 0.05 * CACHE
    if level == 2:
        with pytest.raises(WeightSyncError, match="the weights were dropped"):
            run_prompts(sleeper, prompts, GREEDY)
        reference = load_model(tmp_path / "model")
        asyncio.run(sleeper.update_weights([list(reference.named_parameters())], 1))
    assert all_tokens(run_prompts(sleeper, prompts, GREEDY)) == before


def test_the_cache_can_be_released_alone(sleeper: VllmRollout) -> None:
    awake = free_bytes()
    asyncio.run(sleeper.release(["kv_cache"]))
    assert free_bytes() - awake >= 0.95 * CACHE
    asyncio.run(sleeper.resume(["kv_cache"]))
    request: Any = RolloutRequest("again", [7, 8], SamplingParams(max_tokens=4, ignore_eos=True))
    assert len(asyncio.run(sleeper.generate(request)).sequences[0].token_ids) == 4


def test_log_probs_of_qwen3_with_images(tmp_path: Path) -> None:
    """Sampled placeholders included, and with other weights than the engine started with."""
    old, new = (tiny_vision_folder(tmp_path / f"model{seed}", "qwen3_vl", seed) for seed in (0, 1))
    model = load_vision_model(new)
    prompt, images = vision_prompt(old, [5, 6], noise_image(1), noise_image(3, 40, 32), [7, 8])
    bias = {IMAGE_ID: 4.0}
    sampling = SamplingParams(n=4, max_tokens=16, ignore_eos=True, logit_bias=tuple(bias.items()))
    rollout = build(old, dtype="float32")
    try:
        asyncio.run(rollout.update_weights([list(model.named_parameters())], 1))
        (output,) = generate_all(rollout, [RolloutRequest("r", prompt, sampling, 1, {"image": images})])
    finally:
        rollout.close()
    for sequence in output.sequences:
        expected = image_log_probs(model, new, prompt, images, sequence.token_ids, bias)
        assert list(sequence.log_probs) == pytest.approx(expected, abs=1e-3)
