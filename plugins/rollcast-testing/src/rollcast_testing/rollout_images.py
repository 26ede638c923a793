"""Conformance tests of rollouts with images."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollcast.contracts.rollout import BaseRollout, RolloutOutput, RolloutRequest, SamplingParams, rollouts
from rollcast.errors import RollcastError
from rollcast_testing.rollout_tools import RolloutFixtures, generate_all

__all__ = ["RolloutImages"]

Prompt = tuple[list[int], tuple[bytes, ...]]


class RolloutImages(RolloutFixtures):
    """Tests with images; part of :class:`~rollcast_testing.rollout.RolloutSuite`."""

    def test_images(self, tmp_path: Path) -> None:
        """Check log-probs after prompts with images, before and after an update of the whole model.

        The prompts have one image, two images, and none, in one batch. Sampled placeholders are read as the end of an
        image. A prompt whose placeholders do not match its images is refused without affecting the others.
        """
        if not rollouts.get(self.name).capabilities.multi_modal:
            pytest.skip("capabilities.multi_modal is False")
        pytest.importorskip("PIL")
        from rollcast_testing import tiny_vision

        old, new = (tiny_vision.tiny_vision_folder(tmp_path / f"model{seed}", seed=seed) for seed in (0, 1))
        first, second, large = (
            tiny_vision.noise_image(1),
            tiny_vision.noise_image(2),
            tiny_vision.noise_image(3, 40, 32),
        )
        prompts = [
            tiny_vision.vision_prompt(old, [5, 6], first, [7, 8]),
            tiny_vision.vision_prompt(old, second, large, [9]),
            tiny_vision.vision_prompt(old, [5, 6, 7]),
        ]
        rollout = self.build_rollout(old)
        try:
            assert rollout.capabilities.multi_modal
            self._check_images(rollout, tiny_vision.load_vision_model(old), old, prompts)
            other = tiny_vision.load_vision_model(new)
            named = [(name, weight.detach()) for name, weight in other.named_parameters()]
            asyncio.run(rollout.update_weights([named[: len(named) // 2], named[len(named) // 2 :]], 3))
            self._check_images(rollout, other, old, prompts)
            _check_refusals(rollout, prompts[0])
        finally:
            rollout.close()

    def _check_images(self, rollout: BaseRollout, model: Any, folder: Path, prompts: Sequence[Prompt]) -> None:
        from rollcast_testing.tiny_vision import IMAGE_ID, VIDEO_ID, image_log_probs

        sampling = SamplingParams(n=2, max_tokens=10, ignore_eos=True)
        biased = replace(sampling, logit_bias=((IMAGE_ID, 5.0), (VIDEO_ID, 5.0)))
        for params in (sampling, *((biased,) if "logit_bias" in rollout.capabilities.sampling else ())):
            requests = [_request(f"r{number}", prompt, params) for number, prompt in enumerate(prompts)]
            for prompt, output in zip(prompts, generate_all(rollout, requests), strict=True):
                for sequence in output.sequences:
                    expected = image_log_probs(model, folder, *prompt, sequence.token_ids, dict(params.logit_bias))
                    gap = max(abs(got - want) for got, want in zip(sequence.log_probs, expected, strict=True))
                    assert gap <= self.tolerance, f"a log-prob is {gap} away from that of transformers"


def _request(name: str, prompt: Prompt, sampling: SamplingParams) -> RolloutRequest:
    ids, images = prompt
    return RolloutRequest(name, ids, sampling, multi_modal_data={"image": images} if images else None)


def _check_refusals(rollout: BaseRollout, prompt: Prompt) -> None:
    from rollcast_testing.tiny_vision import IMAGE_ID

    ids, images = prompt
    place, sampling = ids.index(IMAGE_ID), SamplingParams(max_tokens=2)
    requests = [
        _request("good", prompt, sampling),
        _request("cut", ([*ids[:place], *ids[place + 1 :]], images), sampling),
        _request("absent", (ids, ()), sampling),
        _request("broken", (ids, (b"no image",)), sampling),
        RolloutRequest("video", ids, sampling, multi_modal_data={"video": images}),
    ]

    async def run() -> list[RolloutOutput | BaseException]:
        return await asyncio.gather(*map(rollout.generate, requests), return_exceptions=True)

    good, *refused = asyncio.run(run())
    assert isinstance(good, RolloutOutput), f"the request beside bad ones gave {good!r}"
    for request, error in zip(requests[1:], refused, strict=True):
        assert isinstance(error, RollcastError), f"the request {request.request_id!r} gave {error!r}"
        assert f"request '{request.request_id}'" in str(error)
