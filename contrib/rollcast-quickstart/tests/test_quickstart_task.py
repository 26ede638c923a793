from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoTokenizer, Qwen2ForCausalLM

from rollcast.errors import DataError
from rollcast_data.files import read_rows
from rollcast_data.prompts import PromptDataset
from rollcast_data.schemas import DataConfig
from rollcast_data.supervised import SupervisedDataset
from rollcast_data.tokenizer import load_tokenizer
from rollcast_quickstart.task import SPLITS, SortDigits
from rollcast_quickstart.tokenizer import VOCABULARY, build_tokenizer


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sort_digits")
    report = SortDigits().run(None, folder, seed=3)
    assert report.rows == {f"{split}.jsonl": count for split, count in SPLITS.items()}
    return folder


def columns(path: Path) -> list[dict[str, str]]:
    return [dict(row.values) for row in read_rows(path)]


def test_rows(made: Path) -> None:
    answers = {"sft": {"response"}, "sft_stop": {"response", "ground_truth"}}
    for split, count in {"sft": 2000, "sft_stop": 500, "train": 6000, "test": 500}.items():
        rows = columns(made / f"{split}.jsonl")
        assert len(rows) == count
        for row in rows:
            names = answers.get(split, {"ground_truth"})
            assert set(row) == {"prompt", *names}
            assert len(row["prompt"]) == 9
            assert all(row[name] == "".join(sorted(row["prompt"][:-1])) for name in names)


def test_no_prompt_is_there_twice(made: Path) -> None:
    prompts = [row["prompt"] for split in SPLITS for row in columns(made / f"{split}.jsonl")]
    assert len(set(prompts)) == len(prompts) == sum(SPLITS.values())


def test_the_data_is_a_function_of_the_seed(made: Path, tmp_path: Path) -> None:
    for seed in (3, 4):
        SortDigits().run(None, tmp_path / str(seed), seed=seed)
    for split in SPLITS:
        name = f"{split}.jsonl"
        assert (tmp_path / "3" / name).read_bytes() == (made / name).read_bytes()
        first, second = ({row["prompt"] for row in columns(tmp_path / seed / name)} for seed in "34")
        assert len(first & second) < 10


def test_a_kill_leaves_no_data_files_without_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(path: Path, rows: object) -> int:
        assert load_tokenizer(str(tmp_path / "model"))("31=")["input_ids"]
        assert AutoConfig.from_pretrained(tmp_path / "model").vocab_size == len(VOCABULARY)
        raise KeyboardInterrupt

    monkeypatch.setattr("rollcast_quickstart.task.write_jsonl", killed)
    with pytest.raises(KeyboardInterrupt):
        SortDigits().run(None, tmp_path, seed=3)


def test_a_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="reads no source"):
        SortDigits().run(tmp_path, tmp_path / "out")


def test_the_tokenizer_reloads(made: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(made / "model"))
    assert len(tokenizer) == len(VOCABULARY) == 83
    assert tokenizer.padding_side == "left"
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    text = "".join(VOCABULARY[3:])
    ids = tokenizer(text)["input_ids"]
    assert ids == list(range(3, 83))
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*tokenizer("12").input_ids, 2, 0], skip_special_tokens=True) == "12"
    assert tokenizer("é1€")["input_ids"] == [VOCABULARY.index("1")]
    assert tokenizer.decode(tokenizer("1?")["input_ids"], skip_special_tokens=True) == "1?"
    assert tokenizer("<eos>")["input_ids"] == [2]
    for other in (build_tokenizer(), load_tokenizer(made / "model")):
        assert other.get_vocab() == tokenizer.get_vocab()
        assert other(text)["input_ids"] == ids
        assert other.decode(ids) == text


def test_the_model_config_builds_the_model(made: Path) -> None:
    config = AutoConfig.from_pretrained(str(made / "model"))
    raw = json.loads((made / "model" / "config.json").read_text())
    assert raw["model_type"] == "qwen2"
    assert raw["architectures"] == ["Qwen2ForCausalLM"]
    model = Qwen2ForCausalLM(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(0.54e6, rel=0.02)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert (config.num_hidden_layers, config.max_position_embeddings, config.vocab_size) == (2, 256, 83)
    assert not list((made / "model").glob("*.safetensors"))


def test_the_datasets_read_it(made: Path) -> None:
    tokenizer = load_tokenizer(made / "model")
    prompts = PromptDataset([made / "train.jsonl"], tokenizer, DataConfig(max_prompt_length=9))
    batch = prompts.collate([prompts[0], prompts[1]])
    assert [len(row) for row in batch["prompts"].unbind()] == [9, 9]
    supervised = SupervisedDataset([made / "sft*.jsonl"], tokenizer, DataConfig(max_response_length=9))
    assert len(supervised) == 2500
    assert str(tokenizer.decode(list(supervised[0].response_ids))).endswith("<eos>")


def test_the_package_imports_nothing_heavy() -> None:
    code = "import sys, rollcast_quickstart; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
