"""Meshes, models and keys that cannot work are refused before anything trains, with what would fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import megatron_scenarios as scenarios
import pytest
import torch
from megatron_models import family_config, family_folder
from safetensors.torch import load_file, save_file

from rollcast import build_section
from rollcast.contracts.engine import EngineSetup, ForwardSettings, ModelConfig
from rollcast.errors import CapabilityError, ConfigError, DataProtoError
from rollcast_megatron.engine import MegatronEngine
from rollcast_megatron.maps import families, find_map
from rollcast_megatron.schemas import MegatronConfig
from rollcast_testing.ranks import Ranks
from rollcast_testing.tiny import nll_loss, random_batch

TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
VP2 = {**PP2, "virtual_pipeline_model_parallel_size": 2}


@pytest.mark.parametrize(
    ("keys", "ranks", "message"),
    [
        (
            {"tensor_model_parallel_size": 3},
            8,
            r"multiple of 3 ranks, but the group has 8; .*sizes that fit: 1x1, .*8x1",
        ),
        ({**TP2, **PP2}, 2, r"multiple of 4 ranks, but the group has 2"),
        (
            {"pipeline_model_parallel_size": 0},
            2,
            r"actor\.engine\.pipeline_model_parallel_size must be at least 1, got 0",
        ),
        (
            {**TP2, "context_parallel_size": 2},
            6,
            r"context_parallel_size=2 and .* multiple of 4 ranks, but the group has 6; .*fit 3 ranks: 1x1, 1x3, 3x1",
        ),
        (
            {"expert_model_parallel_size": 2, "tensor_model_parallel_size": 2},
            2,
            r"expert_model_parallel_size is 2, .* 1 data- and context-parallel ranks .*sizes that fit: 1",
        ),
        (
            {"sequence_parallel": True},
            2,
            r"sequence_parallel is true, but actor\.engine\.tensor_model_parallel_size is 1",
        ),
        (
            {"virtual_pipeline_model_parallel_size": 2},
            2,
            r"virtual_pipeline_model_parallel_size is 2, but actor\.engine\.pipeline_model_parallel_size is 1",
        ),
        (
            {**PP2, "virtual_pipeline_model_parallel_size": 1},
            2,
            r"actor\.engine\.virtual_pipeline_model_parallel_size must be at least 2",
        ),
        ({"dtype": "fp8"}, 1, r"dtype must be one of float32, bfloat16, got 'fp8'"),
        (
            {"recompute_granularity": "half"},
            1,
            r"recompute_granularity must be one of full, selective or null, got 'half'",
        ),
        ({"recompute_granularity": "full"}, 1, r"recompute_method is null"),
        ({"recompute_granularity": "full", "recompute_method": "block"}, 1, r"recompute_num_layers is null"),
        ({"recompute_num_layers": 1}, 1, r"belong to recompute_granularity=full"),
        ({"head_chunk_size": 0}, 1, r"head_chunk_size must be at least 1, got 0"),
    ],
    ids=str,
)
def test_keys(keys: dict[str, Any], ranks: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_section(MegatronConfig, keys, "actor.engine").check(ranks)


def test_what_it_does_not_train() -> None:
    for model, message in ((ModelConfig(use_liger=True), r"model.use_liger"),):
        with pytest.raises(CapabilityError, match=message):
            MegatronEngine(EngineSetup("language_model", model, MegatronConfig(), None, scenarios.ALONE))
    for changes in ({"optimizer": "sgd"}, {"optimizer_kwargs": {"amsgrad": True}}):
        optim = replace(scenarios.OPTIM, **changes)
        with pytest.raises(ConfigError, match=r"only has megatron-core's AdamW"):
            MegatronEngine(EngineSetup("language_model", ModelConfig(), MegatronConfig(), optim, scenarios.ALONE))


def test_only_its_own_config() -> None:
    with pytest.raises(ConfigError, match="MegatronConfig"):
        MegatronEngine(EngineSetup("language_model", ModelConfig(), object(), None, scenarios.ALONE))


@pytest.mark.parametrize(
    ("keys", "changes", "message"),
    [
        ({"tensor_model_parallel_size": 8}, {}, r"does not divide the model's 4 attention heads; .*heads: 1, 2, 4"),
        (
            TP2,
            {"num_attention_heads": 12, "num_key_value_heads": 3, "hidden_size": 48},
            r"does not divide the model's 3 key-value heads; .*heads: 1, 3, 6, 12",
        ),
        (TP2, {"intermediate_size": 45}, r"does not divide the model's 45 rows of the MLP"),
        ({"pipeline_model_parallel_size": 3}, {}, r"does not divide the model's 4 layers; .*sizes that fit: 1, 2, 4"),
        (
            {"pipeline_model_parallel_size": 3, "num_layers_in_first_pipeline_stage": 1},
            {},
            r"num_layers_in_first_pipeline_stage is 1: .*3 of the model's 4 layers are left for the 2 other stages",
        ),
        (
            {**PP2, "virtual_pipeline_model_parallel_size": 3},
            {},
            r"virtual_pipeline_model_parallel_size is 3, .* of each pipeline stage \(2, 2\); sizes that fit: 2, or null",
        ),
        (
            {**PP2, "virtual_pipeline_model_parallel_size": 3, "num_layers_in_first_pipeline_stage": 4},
            {"num_hidden_layers": 10},
            r"of each pipeline stage \(4, 6\); sizes that fit: 2, or null",
        ),
        ({**VP2, "num_layers_in_first_pipeline_stage": 1}, {}, r"of each pipeline stage \(1, 3\); only null fits"),
    ],
    ids=["heads", "key-value-heads", "mlp", "layers", "uneven", "chunks", "chunks-of-uneven", "no-chunks"],
)
def test_models_that_the_mesh_cannot_split(
    tmp_path: Path, keys: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    from rollcast_megatron.build import check_model

    with pytest.raises(ConfigError, match=message):
        check_model(find_map(family_config("llama", False, **changes)), MegatronConfig(**keys))


@pytest.mark.parametrize(
    ("family", "keys", "changes", "message"),
    [
        ("qwen3_moe", {"expert_model_parallel_size": 3}, {}, r"does not divide the model's 4 experts; .*fit: 1, 2, 4"),
        ("qwen3_moe", TP2, {}, r"sequence_parallel is false, but the model has experts"),
        ("qwen3_moe", TP2, {"moe_intermediate_size": 25}, r"does not divide the 25 rows of the model's experts"),
        ("qwen3", {"expert_model_parallel_size": 2}, {}, r"expert_model_parallel_size is 2, .*has no experts"),
    ],
    ids=["experts", "positions", "rows", "dense"],
)
def test_experts_that_the_mesh_cannot_split(
    family: str, keys: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    from rollcast_megatron.build import check_model

    with pytest.raises(ConfigError, match=message):
        check_model(find_map(family_config(family, False, **changes)), MegatronConfig(**keys))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"use_remove_padding": True}, r"use_remove_padding is true, but dtype is float32: .*set dtype to bfloat16"),
        ({"context_parallel_size": 2}, r"context_parallel_size is 2, but dtype is float32"),
    ],
    ids=["packed", "context"],
)
def test_rows_that_transformer_engine_has_no_kernel_for(
    monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], message: str
) -> None:
    from rollcast_megatron.build import check_attention

    check_attention(MegatronConfig(**keys))
    monkeypatch.setattr("rollcast_megatron.module.has_transformer_engine", lambda: True)
    check_attention(MegatronConfig(dtype="bfloat16", **keys))
    with pytest.raises(ConfigError, match=message):
        check_attention(MegatronConfig(**keys))


def test_a_size_that_the_model_refuses_is_named_with_its_role(tmp_path: Path) -> None:
    family_config("llama", False).save_pretrained(tmp_path)
    keys = MegatronConfig(tensor_model_parallel_size=8)
    context = replace(scenarios.ALONE, world_size=8)
    setup = EngineSetup("value_model", ModelConfig(str(tmp_path)), keys, None, context, section="critic")
    with pytest.raises(ConfigError, match=r"^critic\.engine\.tensor_model_parallel_size is 8, which does not divide"):
        MegatronEngine(setup).initialize()


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"attention_bias": True}, "attention_bias=True"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window=True"),
        ("qwen3", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ],
)
def test_models_that_a_map_does_not_know(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_map(family_config(family, False, **changes))


def test_a_model_without_a_map(tmp_path: Path) -> None:
    from transformers import GPT2Config

    with pytest.raises(
        ConfigError, match=r"no map for the model type 'gpt2' .*llama, qwen2, qwen3, qwen3_moe; use engine=fsdp"
    ):
        find_map(GPT2Config())
    with families.temporarily("gpt2", lambda config: f"the map of {config.model_type}"):
        assert find_map(GPT2Config()) == "the map of gpt2"


def test_folders(tmp_path: Path) -> None:
    family_config("llama", False).save_pretrained(tmp_path / "bare")
    with pytest.raises(ConfigError, match=r"contains no \*.safetensors; set model.random_init"):
        scenarios.build(scenarios.ALONE, tmp_path / "bare")
    torch.save({}, tmp_path / "bare" / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="reads safetensors"):
        scenarios.build(scenarios.ALONE, tmp_path / "bare")
    folder = family_folder(tmp_path / "model", "llama", tied=False)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    lacking = dict(tensors)
    del lacking["model.layers.3.mlp.up_proj.weight"]
    save_file(lacking, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"lack 1 parameters, such as model.layers.3.mlp.up_proj.weight"):
        scenarios.build(scenarios.ALONE, folder)
    save_file(tensors | {"model.norm.weight": torch.ones(31)}, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"model.norm.weight .* has shape \[31\], but config.json implies \[32\]"):
        scenarios.build(scenarios.ALONE, folder)
    file.write_bytes(b"torn")
    with pytest.raises(ConfigError, match="cannot be read"):
        scenarios.build(scenarios.ALONE, folder)
    index = {"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    save_file(tensors, file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"lacks the weights file model-00002-of-00002\.safetensors"):
        scenarios.build(scenarios.ALONE, folder)


def test_positions_that_do_not_count(model_of: Callable[..., Path]) -> None:
    batch = random_batch(3, 4, 4)
    engine = scenarios.build(scenarios.ALONE, model_of())
    with pytest.raises(DataProtoError, match="position_ids that count"), engine.eval_mode():
        engine.infer_batch(batch.with_columns({"position_ids": batch["position_ids"] * 2}), ForwardSettings())
    with engine.eval_mode():
        shifted = batch.with_columns({"position_ids": batch["position_ids"] + 7})
        first, second = (engine.infer_batch(data, ForwardSettings())[0]["log_probs"] for data in (batch, shifted))
    assert torch.equal(first, second)
    untrained = scenarios.build(scenarios.ALONE, model_of(), trained=False)
    with pytest.raises(TypeError, match="built without optim"):
        untrained.train_batch(batch, nll_loss, ForwardSettings())


def test_ranks_that_cannot_share_a_model(two_ranks: Ranks, model_of: Callable[..., Path]) -> None:
    folder = model_of()
    for text in two_ranks.run(scenarios.fail, folder=folder, tensor_model_parallel_size=4):
        assert "multiple of 4 ranks, but the group has 2" in text
    for text in two_ranks.run(scenarios.two_meshes, folder=folder):
        assert "split 2 (tensor) x 1 (context) x 1 (pipeline) x 1 (expert) ways" in text


def test_only_an_engine_on_the_same_mesh_is_a_reference(model_of: Callable[..., Path]) -> None:
    engine = scenarios.build(scenarios.ALONE, model_of())
    with pytest.raises(CapabilityError, match="on the same mesh"):
        engine.set_reference(object())  # type: ignore[arg-type]
