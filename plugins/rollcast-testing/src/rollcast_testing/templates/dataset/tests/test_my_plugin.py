import pytest
from transformers import AutoTokenizer

from rollcast.errors import DataError
from rollcast.protocol import Jagged
from rollcast_data.contract import datasets
from rollcast_my_plugin import MyPlugin
from rollcast_testing.tiny import tiny_model_folder


@pytest.fixture
def tokenizer(tmp_path):
    return AutoTokenizer.from_pretrained(tiny_model_folder(tmp_path / "model", weights=False))


def test_rows_become_a_batch(tmp_path, tokenizer):
    (tmp_path / "train.tsv").write_text("1+1=\t2\n10+5=\t15\n")
    dataset = datasets.get("my_plugin")([tmp_path / "train.tsv"], tokenizer, {})
    assert len(dataset) == 2
    batch = dataset.collate([dataset[0], dataset[1]])
    prompts = Jagged.of(batch["prompts"])
    assert prompts.lengths.tolist() == [4, 5]
    assert tokenizer.decode(prompts.values[4:].tolist()) == "10+5="
    assert list(batch["ground_truth"]) == ["2", "15"]


def test_a_bad_line_is_named(tmp_path):
    (tmp_path / "bad.tsv").write_text("1+1=\t2\n1+2=3\n")
    with pytest.raises(DataError, match=r"bad.tsv:2: .* no tab"):
        MyPlugin([tmp_path / "bad.tsv"], None, {})
