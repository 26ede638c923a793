"""Prompts with images on tiny models of the Qwen-VL kinds, against transformers' own forward pass."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from rollcast.contracts.rollout import RolloutRequest, RolloutSetup, SamplingParams
from rollcast_hf.rollout import HfRollout
from rollcast_hf.schemas import HfRolloutConfig
from rollcast_testing.rollout_tools import EOS, PAD, generate_all
from rollcast_testing.tiny_vision import (
    IMAGE_ID,
    VisionKind,
    image_log_probs,
    load_vision_model,
    noise_image,
    tiny_vision_folder,
    vision_prompt,
)

SAMPLING = SamplingParams(max_tokens=10, ignore_eos=True)


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_log_probs_are_those_of_transformers(kind: VisionKind, tmp_path: Path) -> None:
    """One image between texts, two of different sizes, and none, in one batch; then with other weights."""
    old, new = (tiny_vision_folder(tmp_path / f"model{seed}", kind, seed) for seed in (0, 1))
    prompts = [
        vision_prompt(old, [5, 6], noise_image(1), [7, 8]),
        vision_prompt(old, noise_image(2), noise_image(3, 40, 32), [9]),
        vision_prompt(old, [5, 6, 7]),
    ]
    bias = {IMAGE_ID: 4.0}
    rollout = HfRollout(RolloutSetup(HfRolloutConfig(), str(old), 0, PAD, EOS))
    for folder in (old, new):
        model = load_vision_model(folder)
        if folder == new:
            asyncio.run(rollout.update_weights([list(model.named_parameters())], 1))
        for sampling in (SAMPLING, replace(SAMPLING, logit_bias=tuple(bias.items()))):
            requests = [
                RolloutRequest(f"r{i}", ids, replace(sampling, n=2), i, {"image": images} if images else None)
                for i, (ids, images) in enumerate(prompts)
            ]
            for prompt, output in zip(prompts, generate_all(rollout, requests), strict=True):
                for sequence in output.sequences:
                    expected = image_log_probs(model, old, *prompt, sequence.token_ids, dict(sampling.logit_bias))
                    assert list(sequence.log_probs) == pytest.approx(expected, abs=1e-4)
    rollout.close()
