"""Weights read part by part into a sharded module; checkpoints that go from one number of ranks to another."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import fsdp_scenarios as scenarios
import loading_scenarios as loading
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)

from rollcast.contracts.weights import StackedWeights
from rollcast.errors import ConfigError
from rollcast_fsdp.loading import read_stacked
from rollcast_testing.tiny import plain_model, plain_weights, tiny_model_folder

pytestmark = pytest.mark.long

ALONE = scenarios.ALONE


def assert_equal(given: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert given.keys() == expected.keys()
    assert all(torch.equal(given[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("folder", ["model_folder", "untied_folder"])
def test_each_rank_reads_and_holds_its_part(ranks: Any, folder: str, request: pytest.FixtureRequest) -> None:
    source = request.getfixturevalue(folder)
    expected = plain_weights(plain_model(source))
    size = sum(tensor.nbytes for tensor in expected.values())
    alone = loading.load(ALONE, source)
    assert alone["read"] == alone["held"] == size
    assert_equal(alone["weights"], expected)
    results = ranks.run(loading.load, folder=source)
    assert sum(result["read"] for result in results) == size
    for result in results:
        assert result["read"] <= 0.55 * size
        assert result["held"] <= 0.55 * size
        assert_equal(result["weights"], expected)
        assert_equal(result["buffers"], dict(plain_model(source).named_buffers()))


def test_hybrid_groups_read_their_parts(ranks: Any, model_folder: Path) -> None:
    expected = plain_weights(plain_model(model_folder))
    size = sum(tensor.nbytes for tensor in expected.values())
    results = ranks.run(loading.load, world_size=4, folder=model_folder, fsdp_size=2)
    assert sum(result["read"] for result in results) == 2 * size
    for result in results:
        assert result["read"] <= 0.55 * size
        assert_equal(result["weights"], expected)


def test_files_of_any_kind_are_the_same_weights(untied_folder: Path, tmp_path: Path) -> None:
    """Several files, another dtype, names without the body's prefix, and torch's own format."""
    expected = plain_weights(plain_model(untied_folder))
    for name, save in {
        "sharded": lambda path: plain_model(untied_folder).save_pretrained(path, max_shard_size="60KB"),
        "bf16": lambda path: plain_model(untied_folder).bfloat16().save_pretrained(path),
        "bin": lambda path: torch.save(expected, path / "pytorch_model.bin"),
    }.items():
        path = tmp_path / name
        shutil.copytree(untied_folder, path, ignore=shutil.ignore_patterns("*.safetensors"))
        save(path)
        given = loading.load(ALONE, path)["weights"]
        wanted = {key: tensor.bfloat16().float() for key, tensor in expected.items()} if name == "bf16" else expected
        assert_equal(given, wanted)
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2


def test_a_models_body_and_a_tied_head_by_its_own_name(model_folder: Path, tmp_path: Path) -> None:
    weights = load_file(model_folder / "model.safetensors")
    expected = plain_weights(plain_model(model_folder))
    body = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    head = {"lm_head.weight" if "embed" in name else name: tensor for name, tensor in weights.items()}
    both = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()}
    for number, tensors in enumerate((body, head, both)):
        path = tmp_path / str(number)
        shutil.copytree(model_folder, path)
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
        assert_equal(loading.load(ALONE, path)["weights"], expected)


def test_what_does_not_fit_is_named(model_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    weights = load_file(model_folder / "model.safetensors")
    path = tmp_path / "model"
    shutil.copytree(model_folder, path)
    file = path / "model.safetensors"
    norm = "model.norm.weight"
    save_file({**weights, "model.more": torch.zeros(1)}, file, {"format": "pt"})
    loading.load(ALONE, path)
    assert "does not use: model.more" in caplog.text
    save_file({**weights, norm: torch.zeros(3)}, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"wrong shape for model\.norm\.weight \(\(3,\), not \(64,\)\)"):
        loading.load(ALONE, path)
    del weights[norm]
    save_file({**weights, "model.more": torch.zeros(1)}, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"the folder lacks model\.norm\.weight; also contains model\.more"):
        loading.load(ALONE, path)
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read"):
        loading.load(ALONE, path)


def test_rotary_frequencies_are_computed_anew(ranks: Any, tmp_path: Path) -> None:
    """Those of Llama 3, which depend on more of the config than a base."""
    folder = tiny_model_folder(tmp_path / "llama", weights=False)
    config = LlamaConfig(
        vocab_size=91,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    expected = dict(plain_model(folder).named_buffers())
    assert expected
    for result in ranks.run(loading.load, folder=folder):
        assert_equal(result["buffers"], expected)


def test_weights_are_read_by_part_whatever_transformers_initializes(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before version 5, transformers computed the buffers of rotary embeddings in their constructors only."""
    expected = dict(plain_model(model_folder).named_buffers())
    monkeypatch.setattr(PreTrainedModel, "_init_weights", lambda self, module: None)
    alone = loading.load(ALONE, model_folder)
    assert alone["read"] == alone["held"]
    assert_equal(alone["buffers"], expected)


def test_a_model_that_transformers_rearranges_is_loaded_by_one_rank(ranks: Any, tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path / "moe", weights=False)
    config = MixtralConfig(
        vocab_size=91,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    MixtralForCausalLM(config).save_pretrained(folder)
    expected = plain_weights(AutoModelForCausalLM.from_pretrained(folder))
    results = ranks.run(loading.load, folder=folder)
    assert [result["loaded_whole"] for result in results] == [True, False]
    for result in results:
        assert_equal(result["weights"], expected)


def test_each_rank_reads_its_own_experts(ranks: Any, tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path / "moe", experts=4)
    expected = plain_weights(AutoModelForCausalLM.from_pretrained(folder))
    results = ranks.run(loading.load, folder=folder)
    assert [result["loaded_whole"] for result in results] == [False, False]
    for result in results:
        assert_equal(result["weights"], expected)


# -- checkpoints ----------------------------------------------------------------------------------


def test_checkpoints_go_from_two_ranks_to_one_to_four(ranks: Any, model_folder: Path, tmp_path: Path) -> None:
    """Written in the background of the steps that follow; weights within 1e-6, metrics within 1e-4."""
    first, second = tmp_path / "of_two", tmp_path / "of_one"
    two = ranks.run(loading.go_on, folder=model_folder, before=None, after=first)[0]
    one = loading.go_on(ALONE, model_folder, first, second)
    same = loading.go_on_from(ALONE, model_folder, first)
    four = ranks.run(loading.go_on_from, world_size=4, folder=model_folder, before=second)
    for loaded, saved in [(one, two), (same, two), *((result, one) for result in four)]:
        for name, tensor in saved["saved"].items():
            torch.testing.assert_close(loaded["loaded"][name], tensor, rtol=0, atol=1e-6)
    for resumed, expected in [(same, two), *((result, one) for result in four)]:
        for given, wanted in zip(resumed["history"], expected["history"], strict=True):
            assert given == pytest.approx(wanted, rel=1e-4)
    assert json.loads((first / "engine.json").read_text())["world_size"] == 2


def test_a_rank_that_cannot_write_in_the_background_is_named_on_all(
    ranks: Any, model_folder: Path, tmp_path: Path
) -> None:
    for message in ranks.run(loading.fail_to_write, folder=model_folder, checkpoint=tmp_path / "checkpoint"):
        assert "could not be written: rank 1: no space left" in message
    assert not (tmp_path / "checkpoint" / "engine.json").exists()


def test_another_optimizers_checkpoint_is_refused(model_folder: Path, tmp_path: Path) -> None:
    from dataclasses import replace

    from rollcast.errors import CheckpointError

    engine = scenarios.build(ALONE, model_folder)
    loading.steps(engine, ALONE, 1)
    engine.save_checkpoint(tmp_path / "adamw")
    momentum = replace(loading.OPTIM, optimizer="sgd", optimizer_kwargs={"momentum": 0.9})
    other = scenarios.build(ALONE, model_folder, optim=momentum)
    with pytest.raises(CheckpointError, match=r"has another optimizer: .*exp_avg.* needs momentum_buffer"):
        other.load_checkpoint(tmp_path / "adamw")
    loading.steps(other, ALONE, 2)
    other.save_checkpoint(tmp_path / "sgd")
    again = scenarios.build(ALONE, model_folder, optim=momentum)
    again.load_checkpoint(tmp_path / "sgd")
    assert loading.steps(again, ALONE, 2) == loading.steps(other, ALONE, 2)


def test_a_region_of_stacked_experts_is_read_matrix_by_matrix() -> None:
    (kind,) = [StackedWeights("experts.gate_up_proj", ("experts.*.gate.weight", "experts.*.up.weight"))]
    whole = torch.randn(3, 8, 5)
    parts = kind.parts("layer.experts.gate_up_proj", whole.shape)
    assert parts is not None
    matrices = {name: whole[expert, rows] for name, (expert, rows) in parts.items()}
    read: list[str] = []

    def note(name: str, region: Sequence[slice]) -> Tensor:
        read.append(name)
        return matrices[name][tuple(region)]

    region = (slice(1, 3), slice(2, 6), slice(1, 5))
    assert torch.equal(read_stacked(parts, region, whole, note), whole[region])
    read.clear()
    assert torch.equal(read_stacked(parts, (slice(2, 3), slice(0, 4), slice(0, 5)), whole, note), whole[2:, :4])
    assert read == ["layer.experts.2.gate.weight"]
    assert kind.parts("layer.other_experts.gate_up_proj", whole.shape) is None
