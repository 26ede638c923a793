"""Files of the first model that an export takes along, and those of its weights, which it does not."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from rollcast.contracts.engine import ModelConfig
from rollcast_engine.export import write_folder
from rollcast_testing.tiny import CHAT_TEMPLATE, plain_model, plain_weights, tiny_model_folder

COMPANIONS = ("modeling_own.py", "own_package/layers.py", "preprocessor_config.json", "image_processor/config.json")
UNTRAINED = (
    *("tf_model.h5", "flax_model.msgpack", "model-q4.gguf", "rust_model.ot", "optimizer.pt", "adapter.pth"),
    *("original/consolidated.00.pth", "original/params.json", "onnx/model.onnx", "onnx/config.json"),
    *("checkpoint-10/model.safetensors", "checkpoint-10/config.json", "pytorch_model.bin.index.json"),
)


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("models")
    source = tiny_model_folder(place / "source", chat_template=CHAT_TEMPLATE)
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = {"default": CHAT_TEMPLATE, "tool_use": "{{ tools }}"}
    tokenizer.save_pretrained(source)
    for name in (*COMPANIONS, *UNTRAINED):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text("{}")
    weights = plain_weights(plain_model(source))
    write_folder(place / "export", ModelConfig(path=str(source)), "language_model", iter(weights.items()))
    return place / "export"


def test_every_chat_template_comes_along(export: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(export)
    assert tokenizer.chat_template == {"default": CHAT_TEMPLATE, "tool_use": "{{ tools }}"}


def test_code_and_processors_come_along(export: Path) -> None:
    assert all((export / name).is_file() for name in COMPANIONS)


def test_weights_that_were_not_trained_stay_behind(export: Path) -> None:
    assert [name for name in UNTRAINED if (export / name).exists()] == []
    assert len(list(export.rglob("*.safetensors"))) == 1
