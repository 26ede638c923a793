"""Rows with images on tiny models of the Qwen-VL kinds, against transformers' own forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from rollcast import build_section
from rollcast.contracts.engine import EngineSetup, ForwardSettings, ModelConfig, OptimConfig
from rollcast.contracts.worker import WorkerContext
from rollcast.protocol import DataProto, Jagged
from rollcast_data.vision.model_inputs import ImageInputs
from rollcast_engine.images import MicroImages
from rollcast_fsdp.engine import FsdpEngine
from rollcast_fsdp.schemas import FsdpConfig
from rollcast_testing.tiny import nll_loss
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

RESPONSES = ([9, 8, 7, 6], [4, IMAGE_ID, 5], [VIDEO_ID, 12])


def jagged(rows: Sequence[Sequence[int]]) -> Jagged:
    values = torch.tensor([each for row in rows for each in row], dtype=torch.int32)
    return Jagged.from_lengths(values, torch.tensor([len(row) for row in rows]))


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_log_probs_and_training_with_images(kind: VisionKind, tmp_path: Path) -> None:
    """Log-probs are transformers'; a step moves the weights of the vision tower."""
    folder = tiny_vision_folder(tmp_path / "model", kind)
    prompts = [
        vision_prompt(folder, [5, 6], noise_image(1), [7, 8]),
        vision_prompt(folder, noise_image(2), noise_image(3, 40, 32), [9]),
        vision_prompt(folder, [5, 6, 7]),
    ]
    model = load_vision_model(folder)
    expected = [
        number
        for prompt, response in zip(prompts, RESPONSES, strict=True)
        for number in image_log_probs(model, folder, *prompt, response)
    ]
    responses = jagged(RESPONSES)
    batch = DataProto.from_dict(
        {
            "prompts": jagged([ids for ids, _ in prompts]).column(),
            "responses": responses.column(),
            "response_mask": responses.like(torch.ones(len(responses.values), dtype=torch.bool)),
        },
        non_tensors={"multi_modal_data": [{"image": images} if images else None for _, images in prompts]},
    )
    config = build_section(FsdpConfig, {}, "actor.engine")
    setup = EngineSetup(
        "language_model", ModelConfig(path=str(folder)), config, OptimConfig(lr=1e-3), WorkerContext(), seed=3
    )
    engine = FsdpEngine(setup)
    engine.initialize()
    inputs = ImageInputs(folder)
    # With fills, as on several ranks, a micro-batch without images runs the vision tower on a blank one.
    for rows, fills in ((1, False), (1, True), (3, False)):
        settings = ForwardSettings(micro_batch_size_per_gpu=rows)
        engine.vision = MicroImages(inputs, fills=fills)
        with engine.eval_mode():
            found = Jagged.of(engine.infer_batch(batch, settings)[0]["log_probs"]).values
        assert found.tolist() == pytest.approx(expected, abs=1e-5)
    before = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()}
    with engine.train_mode():
        engine.train_batch(batch, nll_loss, settings)
    moved = {name for name, tensor in engine.get_per_tensor_param() if not torch.equal(tensor, before[name])}
    assert {name for name in before if ".visual." in name} <= moved
