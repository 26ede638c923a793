"""The vision-language model of quickstart_images: engine, rollout and transformers agree."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

sys.path.insert(0, str(Path(__file__).parent))  # the scenarios, here and in the spawned ranks

import vision_scenarios as scenarios

from rollcast.contracts.engine import ForwardSettings
from rollcast.contracts.rollout import RolloutRequest, RolloutSetup, SamplingParams
from rollcast.errors import CapabilityError, ConfigError, DataError
from rollcast.protocol import DataProto, Jagged
from rollcast_data.files import write_jsonl
from rollcast_data.prompts import PromptDataset
from rollcast_data.supervised import SupervisedDataset
from rollcast_data.tokenizer import load_tokenizer
from rollcast_data.vision.model_inputs import ImageInputs
from rollcast_hf.rollout import HfRollout
from rollcast_hf.schemas import HfRolloutConfig
from rollcast_quickstart import squares
from rollcast_serving.generation import generate_sequences
from rollcast_serving.wire import decode_requests, encode_requests
from rollcast_testing.ranks import shared_ranks

SETTINGS = ForwardSettings(micro_batch_size_per_gpu=4)
PATHS = {"max_prompt_length": 64, "max_response_length": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data and a model whose weights are random, large enough that the image matters."""
    folder = tmp_path_factory.mktemp("squares")
    given = dict(squares.SPLITS)
    squares.SPLITS = {"sft": 6, "train": 6}  # type: ignore[misc]
    try:
        squares.CountSquares().run(None, folder)
    finally:
        squares.SPLITS = given  # type: ignore[misc]
    torch.manual_seed(0)
    model: Any = AutoModelForImageTextToText.from_config(squares.build_vision_config(), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.15)
    model.save_pretrained(folder / "model")
    return folder


@pytest.fixture(scope="module")
def batch(folder: Path) -> DataProto:
    """Rows with one image, two images, and none."""
    rows = SupervisedDataset([folder / "sft.jsonl"], load_tokenizer(folder / "model"), PATHS)
    one = (folder / "sft.jsonl").read_text().splitlines()
    import json

    first, second = (json.loads(line) for line in one[:2])
    parts = first["prompt"][0]["content"]
    two = {"prompt": [{"role": "user", "content": [*parts, *second["prompt"][0]["content"]]}], "response": "56"}
    none = {"prompt": [{"role": "user", "content": [{"type": "text", "text": "12="}]}], "response": "7"}
    write_jsonl(folder / "mixed.jsonl", [two, none])
    mixed = SupervisedDataset([folder / "mixed.jsonl"], load_tokenizer(folder / "model"), PATHS)
    return rows.collate([*(rows[index] for index in range(4)), mixed[0], mixed[1]])


def plain_log_probs(folder: Path, batch: DataProto) -> torch.Tensor:
    """Log-probs of the responses by transformers alone, one row at a time, with its own positions."""
    model: Any = AutoModelForImageTextToText.from_pretrained(folder / "model", dtype=torch.float32).eval()
    inputs = ImageInputs(folder / "model")
    prompts, responses = Jagged.of(batch["prompts"]), Jagged.of(batch["responses"])
    found = []
    for row, images in enumerate(batch["multi_modal_data"]):
        prompt = prompts.values[prompts.offsets[row] : prompts.offsets[row + 1]]
        response = responses.values[responses.offsets[row] : responses.offsets[row + 1]].long()
        ids = torch.cat([prompt.long(), response])[None]
        given: dict[str, Any] = {}
        if images:
            pixels, grids = inputs.pixels(images["image"])
            types = (ids == inputs.image_token_id).int()
            given = {"pixel_values": pixels, "image_grid_thw": grids, "mm_token_type_ids": types}
        with torch.no_grad():
            logits = model(input_ids=ids, **given).logits[0, len(prompt) - 1 : -1]
        found.append(logits.log_softmax(-1).gather(-1, response[:, None])[:, 0])
    return torch.cat(found)


def infer(engine: Any, batch: DataProto, settings: ForwardSettings = SETTINGS) -> torch.Tensor:
    with engine.eval_mode():
        return Jagged.of(engine.infer_batch(batch, settings)[0]["log_probs"]).values


@pytest.mark.parametrize("keys", [{}, {"use_fused_kernels": True}, {"share_prompts": True}])
def test_the_engine_agrees_with_transformers(folder: Path, batch: DataProto, keys: dict[str, Any]) -> None:
    engine = scenarios.build(folder / "model", **keys)
    expected = plain_log_probs(folder, batch)
    for settings in (SETTINGS, ForwardSettings(micro_batch_size_per_gpu=1), ForwardSettings(max_token_len_per_gpu=64)):
        torch.testing.assert_close(infer(engine, batch, settings), expected, rtol=0, atol=1e-5)
    order = torch.tensor([4, 5, 2, 0])
    moved = infer(engine, batch.select_idxs(order))
    lengths = Jagged.of(batch["responses"]).lengths.tolist()
    parts = expected.split(lengths)
    torch.testing.assert_close(moved, torch.cat([parts[row] for row in order.tolist()]), rtol=0, atol=1e-5)


def test_other_pixels_give_other_log_probs(folder: Path, batch: DataProto) -> None:
    engine = scenarios.build(folder / "model")
    images = list(batch["multi_modal_data"])
    swapped = batch.drop(["multi_modal_data"]).joined(
        DataProto.from_dict(non_tensors={"multi_modal_data": [images[1], images[0], *images[2:]]})
    )
    gap = (infer(engine, swapped) - infer(engine, batch)).abs()
    first = int(Jagged.of(batch["responses"]).lengths[:2].sum())
    assert float(gap[:first].min()) > 1e-3
    assert float(gap[first:].max()) < 1e-5


def make_rollout(folder: Path) -> HfRollout:
    return HfRollout(RolloutSetup(HfRolloutConfig(max_batch_size=64), str(folder / "model"), 0, 0, 2))


def test_rollout_and_engine_agree(folder: Path, batch: DataProto) -> None:
    """Sampled placeholders included: the model is random, so it samples some."""
    rollout = make_rollout(folder)
    prompts = batch.select(["prompts", "multi_modal_data"]).repeat(24, interleave=True)
    sampling = SamplingParams(max_tokens=8, ignore_eos=True, temperature=1.5)
    made = asyncio.run(generate_sequences(rollout, prompts, sampling))
    rows = made.joined(prompts.select(["multi_modal_data"]))
    sampled = Jagged.of(made["responses"]).values
    assert bool(torch.isin(sampled, torch.tensor(ImageInputs(folder / "model").placeholder_ids)).any())
    engine = scenarios.build(folder / "model")
    expected = infer(engine, rows, replace(SETTINGS, micro_batch_size_per_gpu=32, temperature=1.5))
    torch.testing.assert_close(Jagged.of(made["rollout_log_probs"]).values, expected, rtol=0, atol=1e-4)


def test_placeholders_after_text_are_read_alike_in_every_batch(folder: Path, batch: DataProto) -> None:
    """Log-probs of a row do not depend on whether another row of its batch has images."""
    rollout, engine = make_rollout(folder), scenarios.build(folder / "model")
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    text = batch.select_idxs(torch.tensor([5])).select(["prompts"]).repeat(256, interleave=True)
    made = asyncio.run(generate_sequences(rollout, text, sampling))
    sampled = Jagged.of(made["responses"]).values
    assert bool(torch.isin(sampled, torch.tensor(ImageInputs(folder / "model").placeholder_ids)).any())
    alone = infer(engine, made, replace(SETTINGS, micro_batch_size_per_gpu=64))
    torch.testing.assert_close(Jagged.of(made["rollout_log_probs"]).values, alone, rtol=0, atol=1e-4)
    image = batch.select_idxs(torch.tensor([0])).select(["prompts", "multi_modal_data"])
    seen = asyncio.run(generate_sequences(rollout, image, sampling)).joined(image.select(["multi_modal_data"]))
    none = made.joined(DataProto.from_dict(non_tensors={"multi_modal_data": [None] * len(made)}))
    columns = ["prompts", "responses", "response_mask", "multi_modal_data"]
    both = DataProto.concat([none.select(columns), seen.select(columns)])
    together = infer(engine, both, replace(SETTINGS, micro_batch_size_per_gpu=len(both)))
    torch.testing.assert_close(together[: len(alone)], alone, rtol=0, atol=1e-5)


def test_a_rollout_takes_new_weights_of_the_vision_tower(folder: Path, batch: DataProto) -> None:
    engine = scenarios.build(folder / "model", random_init=True)
    rollout = make_rollout(folder)
    weights = [(name, tensor.clone()) for name, tensor in engine.get_per_tensor_param()]
    assert any(".visual." in name for name, _ in weights)
    prompts = batch.select(["prompts", "multi_modal_data"])

    async def run() -> DataProto:
        await rollout.update_weights([weights], 1)
        return await generate_sequences(rollout, prompts, SamplingParams(max_tokens=4, ignore_eos=True))

    made = asyncio.run(run())
    expected = infer(engine, made.joined(prompts.select(["multi_modal_data"])))
    torch.testing.assert_close(Jagged.of(made["rollout_log_probs"]).values, expected, rtol=0, atol=1e-4)


def test_training_reaches_the_vision_tower_on_two_ranks_too(folder: Path, batch: DataProto) -> None:
    """The last row has no image, so one rank runs the tower on a blank one."""
    alone = scenarios.train(scenarios.ALONE, folder / "model", batch, [6])
    before = dict(scenarios.build(folder / "model").get_per_tensor_param())
    moved = {name for name, tensor in alone["weights"].items() if not torch.equal(tensor, before[name])}
    assert {name for name in before if ".visual." in name} <= moved
    ranks = shared_ranks()
    try:
        both = ranks.run(scenarios.train, folder=folder / "model", batch=batch, splits=[5, 1])
    finally:
        ranks.close()
    for result in both:
        for (norm, metrics), (expected, values) in zip(result["steps"], alone["steps"], strict=True):
            assert norm == pytest.approx(expected, rel=1e-4)
            assert metrics == pytest.approx(values, rel=1e-4)
        for name, tensor in alone["weights"].items():
            torch.testing.assert_close(result["weights"][name], tensor, rtol=1e-4, atol=1e-5, msg=name)


def test_an_export_is_the_whole_model(folder: Path, tmp_path: Path) -> None:
    engine = scenarios.build(folder / "model")
    engine.export(tmp_path / "export")
    model: Any = AutoModelForImageTextToText.from_pretrained(tmp_path / "export", dtype=torch.float32)
    state = model.state_dict()
    for name, tensor in engine.get_per_tensor_param():
        assert torch.equal(state[name], tensor), name
    assert ImageInputs(tmp_path / "export").image_token_id == ImageInputs(folder / "model").image_token_id


def test_packing_and_other_uses_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"actor\.engine\.use_remove_padding is true, but rows with images"):
        scenarios.build(folder / "model", use_remove_padding=True)


def test_an_image_is_sent_once_for_all_responses_of_a_prompt() -> None:
    sampling = SamplingParams(n=1)
    image = b"x" * 10_000
    requests = {
        f"r{index}": RolloutRequest(f"r{index}", [1, 2], sampling, index, {"image": [image]}) for index in range(8)
    }
    body, refused = encode_requests(requests)
    assert not refused
    assert len(body) < 11_000
    assert [request.multi_modal_data for request in decode_requests(body)] == [{"image": (image,)}] * 8
    other = {"a": requests["r0"], "b": replace(requests["r1"], multi_modal_data={"image": [b"y"]})}
    assert [each.multi_modal_data for each in decode_requests(encode_requests(other)[0])] == [
        {"image": (image,)},
        {"image": (b"y",)},
    ]
    _, refused = encode_requests({"v": replace(requests["r0"], multi_modal_data={"video": [b"z"]})})
    assert isinstance(refused["v"], CapabilityError)


def test_marks_in_the_text_take_the_images_of_a_column(folder: Path, tmp_path: Path) -> None:
    import json

    parts = json.loads((folder / "train.jsonl").read_text().splitlines()[0])["prompt"][0]["content"]
    url = parts[0]["image"]
    tokenizer = load_tokenizer(folder / "model")
    as_parts = {"prompt": [{"role": "user", "content": parts}], "ground_truth": "1"}
    as_marks = {"prompt": [{"role": "user", "content": "<image>="}], "images": [url], "ground_truth": "1"}
    write_jsonl(tmp_path / "both.jsonl", [as_parts, as_marks])
    rows = PromptDataset([tmp_path / "both.jsonl"], tokenizer, PATHS)
    made = rows.collate([rows[0], rows[1]])
    prompts = Jagged.of(made["prompts"])
    first, second = prompts.values.split(prompts.lengths.tolist())
    assert torch.equal(first, second)
    assert int((first == ImageInputs(folder / "model").image_token_id).sum()) == 9
    assert made["multi_modal_data"][0] == made["multi_modal_data"][1]
    assert made["raw_prompt"][0] == [{"role": "user", "content": "<image>="}]
    write_jsonl(tmp_path / "more.jsonl", [{**as_marks, "images": [url, url]}])
    with pytest.raises(DataError, match=r"no place for 1 of the 2 images in images \(data.image_key\)"):
        PromptDataset([tmp_path / "more.jsonl"], tokenizer, PATHS)
