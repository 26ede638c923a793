"""Safetensors read in parts and written in any order, and the folders around them."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

from rollcast.contracts.engine import ModelConfig
from rollcast.errors import CheckpointError, ConfigError
from rollcast_engine.export import write_folder
from rollcast_engine.hf import holds_weights
from rollcast_engine.safetensors_writer import SafetensorsWriter
from rollcast_engine.weights import INDEX_FILE, WeightFolder
from rollcast_testing.tiny import plain_model, plain_weights, tiny_model_folder

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8]


def make_tensors(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"a.weight": (6, 5), "b": (7,), "c": (), "d": (3, 2, 4), "empty": (0, 3)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def layout_of(tensors: dict[str, Tensor]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


@given(st.data())
def test_what_is_written_in_any_order_is_read_back(data: st.DataObject) -> None:
    import tempfile

    names = [f"t{number}" for number in range(data.draw(st.integers(1, 8)))]
    tensors = {}
    for name in names:
        shape = data.draw(st.lists(st.integers(0, 5), max_size=3))
        tensors[name] = torch.randint(0, 200, shape).to(data.draw(st.sampled_from(DTYPES)))
    limit = data.draw(st.sampled_from([1, 100, 1 << 20]))
    with tempfile.TemporaryDirectory() as folder:
        writer = SafetensorsWriter(Path(folder), layout_of(tensors), limit)
        for name in data.draw(st.permutations(names)):
            writer.write(name, tensors[name])
        writer.finish()
        found = WeightFolder(Path(folder))
        assert found.shapes == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            given_ = found.read(name)
            assert given_.dtype == tensor.dtype
            assert torch.equal(given_, tensor)
        for file in Path(folder).glob("*.safetensors"):
            assert all(torch.equal(tensor, tensors[name]) for name, tensor in load_file(file).items())


def test_parts_are_read_and_counted(tmp_path: Path) -> None:
    tensors = make_tensors()
    save_file(tensors, tmp_path / "model.safetensors")
    folder = WeightFolder(tmp_path)
    part = folder.read("a.weight", [slice(2, 4), slice(0, 5)])
    assert torch.equal(part, tensors["a.weight"][2:4])
    assert folder.bytes_read == 2 * 5 * 4
    assert torch.equal(folder.read("c", []), tensors["c"])
    assert "a.weight" in folder
    assert "z" not in folder
    folder.close()


def test_a_folder_of_several_files(tmp_path: Path) -> None:
    tensors = make_tensors()
    writer = SafetensorsWriter(tmp_path, layout_of(tensors), shard_bytes=100)
    for name, tensor in tensors.items():
        writer.write(name, tensor)
    writer.finish()
    index = json.loads((tmp_path / INDEX_FILE).read_text())
    assert set(index["weight_map"]) == set(tensors)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert files == [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert len(WeightFolder(tmp_path).shapes) == 5
    shard = tmp_path / files[1]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    with pytest.raises(ConfigError, match=rf"{files[1]} cannot be read"):
        WeightFolder(tmp_path)
    shard.unlink()
    with pytest.raises(ConfigError, match=rf"lacks the weights file {files[1]}"):
        WeightFolder(tmp_path)
    save_file({"other": torch.zeros(1)}, shard)
    with pytest.raises(ConfigError, match=rf"says that \S+ is in {files[1]}, which does not hold it"):
        WeightFolder(tmp_path)
    (tmp_path / INDEX_FILE).write_text("{")
    with pytest.raises(ConfigError, match=r"index\.json cannot be read"):
        WeightFolder(tmp_path)


def test_a_fingerprint_tells_weights_apart(tmp_path: Path) -> None:
    tensors = make_tensors()
    prints = []
    for number, changed in enumerate((tensors, tensors, {**tensors, "b": tensors["b"] + 1})):
        (tmp_path / str(number)).mkdir()
        save_file(changed, tmp_path / str(number) / "model.safetensors")
        prints.append(WeightFolder(tmp_path / str(number)).fingerprint())
    assert prints[0] == prints[1] != prints[2]


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("z", torch.zeros(1), "there is no tensor z"),
        ("b", torch.zeros(8), r"tensor b has shape \(8,\); the model's has \(7,\)"),
        ("c", torch.tensor(0.0), "tensor c was written twice"),
    ],
)
def test_what_does_not_belong_is_refused(tmp_path: Path, name: str, tensor: Tensor, message: str) -> None:
    writer = SafetensorsWriter(tmp_path, layout_of(make_tensors()))
    writer.write("c", torch.tensor(1.0))
    with pytest.raises(ValueError, match=message):
        writer.write(name, tensor)
    with pytest.raises(ValueError, match=r"these tensors were not written: a\.weight, b, d and 1 more"):
        writer.finish()


# -- folders --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_a_folder_opens_in_transformers(tmp_path: Path, tied: bool) -> None:
    source = tiny_model_folder(tmp_path / "source", tied=tied)
    changed = {name: tensor + 1 for name, tensor in plain_weights(plain_model(source)).items()}
    output = tmp_path / "output"
    output.mkdir()
    (output / "model-00001-of-00009.safetensors").write_bytes(b"of an earlier export")
    write_folder(output, ModelConfig(str(source)), "language_model", reversed(changed.items()), shard_bytes=50_000)
    assert len(list(output.glob("*.safetensors"))) > 2
    opened = plain_weights(plain_model(output))
    assert opened.keys() == changed.keys()
    assert all(torch.equal(opened[name], tensor) for name, tensor in changed.items())
    config = json.loads((output / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForCausalLM"]
    assert (config["dtype"], (output / "generation_config.json").is_file()) == ("float32", True)


def test_one_tensor_at_a_time_is_kept(tmp_path: Path) -> None:
    source = tiny_model_folder(tmp_path / "source")
    made: list[weakref.ref[Tensor]] = []

    def make() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in plain_weights(plain_model(source)).items():
            new = tensor + 1
            made.append(weakref.ref(new))
            yield name, new
            del new
            assert sum(each() is not None for each in made) <= 1

    write_folder(tmp_path / "output", ModelConfig(str(source)), "language_model", make())
    assert len(made) > 20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda named: named[1:], r"these tensors were not written: model\.embed_tokens\.weight"),
        (lambda named: [*named, ("more", torch.zeros(1))], "there is no tensor more in the model"),
        (lambda named: [], "there are no weights"),
    ],
)
def test_weights_of_another_model_are_refused_once_all_have_come(tmp_path: Path, change: Any, message: str) -> None:
    source = tiny_model_folder(tmp_path / "source")
    named = change(list(plain_weights(plain_model(source)).items()))
    seen = []

    def pairs() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in [*named, *named[:1]][: len(named)]:
            seen.append(name)
            yield name, tensor

    with pytest.raises(CheckpointError, match=message):
        write_folder(tmp_path / "output", ModelConfig(str(source)), "language_model", pairs())
    assert len(seen) == len(named)


def test_a_rank_that_does_not_write_goes_through_all_of_it(tmp_path: Path) -> None:
    pairs = iter([("a", torch.zeros(1)), ("b", torch.zeros(1))])
    write_folder(tmp_path / "output", ModelConfig("nowhere"), "language_model", pairs, is_writer=False)
    assert next(pairs, None) is None
    assert not (tmp_path / "output").exists()


def test_a_full_disk_is_a_checkpoint_error(tmp_path: Path) -> None:
    source = tiny_model_folder(tmp_path / "source")
    (tmp_path / "output").write_text("a file is in the way")
    named = plain_weights(plain_model(source)).items()
    with pytest.raises(CheckpointError, match="output cannot be written"):
        write_folder(tmp_path / "output", ModelConfig(str(source)), "language_model", named)


def test_a_model_that_transformers_rearranges_keeps_its_layout_in_files(tmp_path: Path) -> None:
    """Experts are one tensor in memory, and one each in files."""
    config = Qwen2MoeConfig(
        vocab_size=91,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
    )
    tiny_model_folder(tmp_path / "source", weights=False)
    torch.manual_seed(0)
    Qwen2MoeForCausalLM(config).save_pretrained(tmp_path / "source")
    module = plain_model(tmp_path / "source")
    changed = {name: tensor * 2 for name, tensor in plain_weights(module).items()}
    write_folder(tmp_path / "output", ModelConfig(str(tmp_path / "source")), "language_model", changed.items())
    theirs, ours = (WeightFolder(tmp_path / name).shapes for name in ("source", "output"))
    assert ours == theirs
    opened = plain_weights(plain_model(tmp_path / "output"))
    assert all(torch.equal(opened[name], tensor) for name, tensor in changed.items())


def test_an_export_has_the_models_companions_and_only_trained_weights(tmp_path: Path) -> None:
    """Named templates, processors and code in subfolders stay; weights in any format are those of the first model."""
    source, output = tmp_path / "model", tmp_path / "model" / "runs" / "export"
    trained = plain_weights(plain_model(tiny_model_folder(source)))
    kept = ["additional_chat_templates/tool_use.jinja", "chat_template.jinja", "modeling_own.py", "code/extra.py"]
    kept += ["audio_tokenizer/preprocessor_config.json", "audio_tokenizer/config.json", "tokenizer.bin"]
    foreign = ["tf_model.h5", "flax_model.msgpack", "model.gguf", "consolidated.00.pth", "pytorch_model.bin", "rest.pt"]
    foreign += ["original/params.json", "original/consolidated.00.pth", "onnx/model.onnx", "onnx/config.json"]
    foreign += ["tf_model.h5.index.json", "adapter_config.json", "adapter_model.bin", ".cache/lock", "rust_model.ot"]
    for name in (*kept, *foreign):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
    output.mkdir(parents=True)
    (output / "model.gguf").write_text("an earlier export's")
    write_folder(output, ModelConfig(str(source)), "language_model", iter(trained.items()))
    files = {str(file.relative_to(output)) for file in output.rglob("*") if file.is_file()}
    assert set(kept) <= files and not set(foreign) & files
    assert {name for name in files if holds_weights(Path(name))} == {"model.safetensors"}
    assert not any(name.startswith("runs") for name in files)
