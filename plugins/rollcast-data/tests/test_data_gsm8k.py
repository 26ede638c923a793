from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from rollcast.errors import DataError
from rollcast_data.files import read_rows, write_parquet
from rollcast_data.preprocess.gsm8k import INSTRUCTION, Gsm8k
from rollcast_data.prompts import PromptDataset
from rollcast_data.schemas import DataConfig

Write = Callable[..., Path]
TRAIN = [
    {"question": "1+1?", "answer": "It is <<1+1=2>>2.\n#### 2"},
    {"question": "600*1.8?", "answer": "#### 1,080"},
    {"question": "0.5-2?", "answer": "#### -1.5 "},
]


def test_sample(write_rows: Write, tmp_path: Path, chat_tokenizer: PreTrainedTokenizerFast) -> None:
    write_rows(TRAIN, "train.jsonl")
    write_rows(TRAIN[:1], "test.jsonl")
    report = Gsm8k().run(tmp_path, tmp_path / "out")
    assert report.rows == {"train.parquet": 3, "test.parquet": 1}
    rows = [row.values for row in read_rows(tmp_path / "out" / "train.parquet")]
    assert rows[0] == {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"1+1?\n{INSTRUCTION}"}],
        "ability": "math",
        "ground_truth": "2",
        "extra_info": {"split": "train", "index": 0, "answer": TRAIN[0]["answer"], "question": "1+1?"},
        "split": "train",
        "index": 0,
    }
    assert [row["ground_truth"] for row in rows] == ["2", "1080", "-1.5"]
    dataset = PromptDataset([tmp_path / "out" / "test.parquet"], chat_tokenizer, DataConfig())
    assert dataset[0].data_source == "openai/gsm8k"
    assert dataset[0].extra_info["question"] == "1+1?"


@pytest.mark.parametrize("place", ["main", "data", "."])
def test_the_layout_of_the_hub(write_rows: Write, tmp_path: Path, place: str) -> None:
    """Shards of Parquet, in the folder of a configuration; the rows are those of the JSON lines."""
    hub = tmp_path / "hub"
    for split, number, count, rows in (
        ("train", 0, 2, TRAIN[:2]),
        ("train", 1, 2, TRAIN[2:]),
        ("test", 0, 1, TRAIN[:1]),
    ):
        write_parquet(hub / place / f"{split}-{number:05}-of-{count:05}.parquet", rows)
    write_parquet(hub / "socratic" / "train-00000-of-00001.parquet", TRAIN[:1])
    assert Gsm8k().run(hub, tmp_path / "out").rows == {"train.parquet": 3, "test.parquet": 1}
    write_rows(TRAIN, "train.jsonl")
    write_rows(TRAIN[:1], "test.jsonl")
    Gsm8k().run(tmp_path, tmp_path / "lines")
    for name in ("train.parquet", "test.parquet"):
        read, expected = ([dict(row.values) for row in read_rows(tmp_path / out / name)] for out in ("out", "lines"))
        assert read == expected
    (hub / place / "train-00000-of-00002.parquet").unlink()
    with pytest.raises(DataError, match=r"train-00001-of-00002\.parquet: shard 0 of 2 is missing"):
        Gsm8k().run(hub, tmp_path / "again")


def test_bad_sources(write_rows: Write, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="gsm8k needs a source"):
        Gsm8k().run(None, tmp_path / "out")
    with pytest.raises(DataError, match=r"train\.jsonl does not exist"):
        Gsm8k().run(tmp_path, tmp_path / "out")
    write_rows(TRAIN, "train.jsonl")
    write_rows([*TRAIN, {"question": "?", "answer": "no end"}], "test.jsonl")
    with pytest.raises(DataError, match=r"test\.jsonl:4: the answer does not end with '#### <number>': 'no end'"):
        Gsm8k().run(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    write_rows([{"question": "?"}], "test.jsonl")
    with pytest.raises(DataError, match=r"test\.jsonl:1: .*no column 'answer'"):
        Gsm8k().run(tmp_path, tmp_path / "out")


def test_the_real_data_set(gsm8k_dir: Path, tmp_path: Path, chat_tokenizer: PreTrainedTokenizerFast) -> None:
    report = Gsm8k().run(gsm8k_dir, tmp_path)
    assert report.rows == {"train.parquet": 7473, "test.parquet": 1319}
    for split in ("train", "test"):
        rows = read_rows(tmp_path / f"{split}.parquet")
        lines = (gsm8k_dir / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
        for row, line in zip(rows, lines, strict=True):
            raw = json.loads(line)
            assert row.values["ground_truth"] == raw["answer"].split("####")[-1].strip().replace(",", "")
            assert row.values["prompt"][0]["content"].startswith(raw["question"])
    dataset = PromptDataset([str(tmp_path / "t*.parquet")], chat_tokenizer, DataConfig(max_prompt_length=2000))
    assert len(dataset) == 7473 + 1319
