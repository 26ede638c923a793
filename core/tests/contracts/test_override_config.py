"""`override_config`: a model's folder with a changed config.json, for everyone who opens the model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from rollcast.contracts.engine import ModelConfig
from rollcast.contracts.storage import NodeCopies
from rollcast.errors import ConfigError

WRITTEN = {
    "model_type": "qwen2_vl",
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "text_config": {"model_type": "qwen2_vl_text", "hidden_size": 64, "num_attention_heads": 4},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROLLCAST_CACHE_DIR", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    (folder / "additional_chat_templates").mkdir(parents=True)
    (folder / "additional_chat_templates" / "tool.jinja").write_text("t")
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", "hidden_size": 64, "own": 1}))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def place(path: Any, **changes: Any) -> Path:
    copies = NodeCopies()
    placed = copies.place(ModelConfig(str(path), override_config=changes), "model")
    copies.make()
    return Path(placed.path)


def test_the_changed_folder_has_the_other_files_and_merged_values(folder: Path) -> None:
    changes = {"hidden_size": 128, "own": 2, "attention_dropout": 0.1}
    placed = place(folder, **changes)
    assert placed.name == "model" and placed != folder
    assert json.loads((placed / "config.json").read_text()) == {"model_type": "qwen2", **changes}
    assert (placed / "tokenizer.json").resolve() == folder / "tokenizer.json"
    assert (placed / "additional_chat_templates" / "tool.jinja").read_text() == "t"
    assert json.loads((folder / "config.json").read_text())["hidden_size"] == 64


def test_a_changed_model_folder_or_value_is_another_folder(folder: Path) -> None:
    first = place(folder, hidden_size=128)
    assert place(folder, hidden_size=128) == first
    assert place(folder, hidden_size=32) != first
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", "hidden_size": 64, "own": 22}))
    assert place(folder, hidden_size=128) != first


def test_no_changes_leave_the_path_alone(folder: Path) -> None:
    assert place(folder) == folder


def test_configs_within_a_config_are_merged(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(WRITTEN))
    found = json.loads((place(folder, text_config={"hidden_size": 128}) / "config.json").read_text())
    assert found["text_config"] == {**WRITTEN["text_config"], "hidden_size": 128}  # type: ignore[dict-item]


def test_a_model_at_a_url_is_changed_after_its_copy(folder: Path) -> None:
    files = MemoryFileSystem()
    files.pipe_file("/bucket/m/config.json", (folder / "config.json").read_bytes())
    try:
        placed = place("memory://bucket/m", hidden_size=128)
        assert json.loads((placed / "config.json").read_text())["hidden_size"] == 128
    finally:
        files.rm("/", recursive=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hiden_size": 1}, "model.override_config.hiden_size is no key of .*; did you mean hidden_size"),
        ({"attn_implementation": "eager"}, "model.override_config.attn_implementation: set model.attn_implementation"),
        ({"torch_dtype": "bfloat16"}, "model.override_config.torch_dtype: set the dtype of"),
        ({"model_type": "llama"}, "model.override_config.model_type: it names another model; set model.path"),
        ({"num_hidden_layers": "many"}, "model.override_config: model type 'qwen2' refuses it"),
    ],
)
def test_a_change_that_the_model_does_not_have_is_refused(folder: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        place(folder, **changes)


def test_a_key_of_a_config_within_is_named_in_full(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(WRITTEN))
    with pytest.raises(ConfigError, match=re.escape("model.override_config.text_config.hiden_size is no key")):
        place(folder, text_config={"hiden_size": 128})
