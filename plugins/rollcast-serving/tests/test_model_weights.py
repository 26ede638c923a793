"""What a model has for weights, and updates and adapters that do not fit it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rollcast.contracts.weights import AdapterWeights
from rollcast.errors import CheckpointError, WeightSyncError
from rollcast_serving.model_weights import ModelWeights, UpdateCheck, check_adapter, write_adapter

pytest.importorskip("transformers")

from rollcast_testing import tiny

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
PROJECTION = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_model_folder(tmp_path_factory.mktemp("weights") / "model", hidden=16, tied=request.param)


@pytest.fixture(scope="module")
def model(folder: Path) -> ModelWeights:
    return ModelWeights.of(str(folder))


def tensors(model: ModelWeights) -> dict[str, Tensor]:
    return {name: torch.zeros(shape) for name, shape in model.shapes.items()}


def load(model: ModelWeights, named: dict[str, Tensor]) -> list[str]:
    check = UpdateCheck(model)
    admitted = [check.admit(name, tensor) for name, tensor in named.items()]
    check.finish(7)
    return [name for name in admitted if name is not None]


def test_names_and_shapes_are_those_of_the_model(folder: Path, model: ModelWeights) -> None:
    weights = tiny.plain_model(folder).state_dict()
    assert dict(model.shapes) == {name: tuple(weight.shape) for name, weight in weights.items()}


def test_experts_are_named_as_in_the_checkpoint(tmp_path: Path) -> None:
    folder = tiny.tiny_model_folder(tmp_path / "mixture", hidden=16, tied=False, experts=3)
    stored = load_file(folder / "model.safetensors")
    assert dict(ModelWeights.of(str(folder)).shapes) == {name: tuple(each.shape) for name, each in stored.items()}


def test_a_whole_update_is_loaded_once(model: ModelWeights) -> None:
    """A tied head by the embedding's name, whichever of the two came."""
    assert sorted(load(model, tensors(model))) == sorted(set(model.names.values()))
    if model.tied:
        without_head = {name: tensor for name, tensor in tensors(model).items() if name != HEAD}
        without_embedding = {name: tensor for name, tensor in tensors(model).items() if name != EMBEDDING}
        assert sorted(load(model, without_head)) == sorted(load(model, without_embedding))


def test_an_update_that_does_not_fit(model: ModelWeights) -> None:
    with pytest.raises(WeightSyncError, match="no weight named 'stranger'") as error:
        load(model, {"stranger": torch.zeros(1)})
    assert error.value.tensor == "stranger"
    with pytest.raises(WeightSyncError, match=r"arrived with shape \(3,\); the model's has"):
        load(model, {EMBEDDING: torch.zeros(3)})
    for name in (EMBEDDING, f"{PROJECTION}.weight"):
        check = UpdateCheck(model)
        check.admit(name, torch.zeros(model.shapes[name]))
        with pytest.raises(WeightSyncError, match="arrived twice"):
            check.admit(name, torch.zeros(model.shapes[name]))
    some = tensors(model)
    del some[f"{PROJECTION}.weight"]
    with pytest.raises(WeightSyncError, match=rf"version 7 lacks {PROJECTION}") as error:
        load(model, some)
    assert error.value.tensor == f"{PROJECTION}.weight"


def test_tied_weights_have_to_be_equal(model: ModelWeights) -> None:
    named = tensors(model) | {HEAD: torch.ones(model.shapes[HEAD])}
    if not model.tied:
        load(model, named)
        return
    with pytest.raises(WeightSyncError, match="arrived with different values"):
        load(model, named)


def make_adapter(model: ModelWeights, rank: int = 4) -> AdapterWeights:
    out, into = model.shapes[f"{PROJECTION}.weight"]
    name = f"base_model.model.{PROJECTION}"
    matrices = {f"{name}.lora_A.weight": torch.ones(rank, into), f"{name}.lora_B.weight": torch.ones(out, rank)}
    return AdapterWeights({"r": rank, "lora_alpha": 8, "target_modules": {"q_proj"}}, matrices)


def test_an_adapter_that_does_not_fit(model: ModelWeights) -> None:
    check_adapter(make_adapter(model), model)
    whole = make_adapter(model)
    first, second = whole.tensors
    wrong = {
        "the adapter has no tensors": AdapterWeights(whole.config, {}),
        "lacks its other half '": AdapterWeights(whole.config, {first: whole.tensors[first]}),
        "with r=8 it must be": AdapterWeights({"r": 8}, whole.tensors),
        "not the A or B of a matrix": AdapterWeights(whole.config, {second.replace("q_proj", "q"): torch.ones(1)}),
    }
    for message, adapter in wrong.items():
        with pytest.raises(WeightSyncError, match=message):
            check_adapter(adapter, model)


def test_an_adapter_is_written_as_peft_does(model: ModelWeights, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    adapter = make_adapter(model)
    write_adapter(tmp_path, adapter)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config == {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    found = load_file(tmp_path / "adapter_model.safetensors")
    assert found.keys() == adapter.tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in adapter.tensors.items())


def test_a_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no model config could be read from"):
        ModelWeights.of(str(tmp_path))
