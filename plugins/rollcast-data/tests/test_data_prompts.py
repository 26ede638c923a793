from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from rollcast.errors import ConfigError, DataError
from rollcast_data.files import write_parquet
from rollcast_data.prompts import PromptDataset
from rollcast_data.schemas import DataConfig

Write = Callable[..., Path]


def chat(content: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def text_of(tokenizer: PreTrainedTokenizerFast, dataset: PromptDataset, index: int = 0) -> str:
    return str(tokenizer.decode(list(dataset[index].input_ids)))


def test_string_prompts_become_a_jagged_batch(write_rows: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [
        {"prompt": "ab", "ground_truth": 1, "data_source": "s", "level": 3, "extra_info": {"why": "x"}},
        {"prompt": "abcd", "ground_truth": "2"},
    ]
    dataset = PromptDataset([write_rows(rows)], tokenizer, DataConfig())
    batch = dataset.collate([dataset[0], dataset[1]])
    [a] = tokenizer("a")["input_ids"]
    assert len(batch) == 2
    assert [row.tolist() for row in batch["prompts"].unbind()] == [[a, a + 1], [a, a + 1, a + 2, a + 3]]
    assert batch["index"].tolist() == [0, 1]
    assert (batch["prompts"].dtype, batch["index"].dtype) == (torch.int32, torch.int64)
    assert list(batch["raw_prompt"]) == ["ab", "abcd"]
    assert list(batch["ground_truth"]) == [1, "2"]
    assert list(batch["data_source"]) == ["s", ""]
    assert list(batch["extra_info"]) == [{"level": 3, "why": "x"}, {}]


def test_messages_go_through_the_chat_template(write_rows: Write, chat_tokenizer: PreTrainedTokenizerFast) -> None:
    path = write_rows([{"prompt": chat("hi"), "ground_truth": ""}, {"prompt": "hi", "ground_truth": ""}])
    dataset = PromptDataset([path], chat_tokenizer, DataConfig())
    assert [text_of(chat_tokenizer, dataset, i) for i in (0, 1)] == ["[user]hi[assistant]", "hi"]
    assert dataset[0].raw_prompt == chat("hi")
    always = PromptDataset([path], chat_tokenizer, {"apply_chat_template": "always"})
    assert [text_of(chat_tokenizer, always, i) for i in (0, 1)] == ["[user]hi[assistant]"] * 2
    never = PromptDataset([path], chat_tokenizer, {"apply_chat_template": "never"})
    assert text_of(chat_tokenizer, never) == "hi"


def test_messages_without_a_template_are_joined_and_that_is_logged_once(
    write_rows: Write, tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]
    path = write_rows([{"prompt": messages, "ground_truth": 0}] * 3)
    dataset = PromptDataset([path], tokenizer, DataConfig())
    assert text_of(tokenizer, dataset) == "be\nhi"
    assert [record.message for record in caplog.records if "no chat template" in record.message] == [
        "the tokenizer has no chat template: the messages of 3 prompts are joined by newlines"
    ]
    with pytest.raises(ConfigError, match=r"data\.apply_chat_template is 'always'"):
        PromptDataset([path], tokenizer, {"apply_chat_template": "always"})


def test_parquet_messages_lose_the_keys_that_are_null(tmp_path: Path, chat_tokenizer: PreTrainedTokenizerFast) -> None:
    path = tmp_path / "a.parquet"
    write_parquet(path, [{"prompt": [*chat("a"), {"role": "tool", "content": "b", "name": "t"}], "ground_truth": 1}])
    dataset = PromptDataset([path], chat_tokenizer, DataConfig())
    assert dataset[0].raw_prompt == [*chat("a"), {"role": "tool", "content": "b", "name": "t"}]
    assert text_of(chat_tokenizer, dataset) == "[user]a[tool]b[assistant]"


def test_a_template_that_refuses_names_the_row(write_rows: Write, chat_tokenizer: PreTrainedTokenizerFast) -> None:
    chat_tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    path = write_rows([{"prompt": chat("a"), "ground_truth": 1}])
    with pytest.raises(DataError, match=r"rows\.jsonl:1: the chat template refuses .* no system role"):
        PromptDataset([path], chat_tokenizer, DataConfig())


def test_overlong_prompts_are_left_out(
    write_rows: Write, tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rollcast.data")
    path = write_rows([{"prompt": "a" * n, "ground_truth": n} for n in (3, 5, 4)])
    dataset = PromptDataset([path], tokenizer, {"max_prompt_length": 4})
    assert [dataset[i].ground_truth for i in range(len(dataset))] == [3, 4]
    assert dataset[1].index == dataset[-1].index == 1
    assert "1 of 3 prompts have more than 4 tokens and are left out" in caplog.text
    with pytest.raises(DataError, match=r"no row is left: all 3 prompts .*max_prompt_length=2 .*shortest has 3"):
        PromptDataset([path], tokenizer, {"max_prompt_length": 2})


def test_overlong_prompts_are_cut_or_refused(write_rows: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write_rows([{"prompt": "ab", "ground_truth": 1}, {"prompt": "abcd", "ground_truth": 1}])
    settings = {"max_prompt_length": 3, "filter_overlong_prompts": False}
    for truncation, text in (("left", "bcd"), ("right", "abc")):
        dataset = PromptDataset([path], tokenizer, {**settings, "truncation": truncation})
        assert text_of(tokenizer, dataset, 1) == text
    with pytest.raises(DataError, match=r"rows\.jsonl:2: the prompt has 4 tokens, more than data\.max_prompt_length=3"):
        PromptDataset([path], tokenizer, settings)


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"ground_truth": 1}, r"no column 'prompt' \(data\.prompt_key\); its columns: ground_truth"),
        ({"prompt": "a"}, r"no column 'ground_truth' \(data\.ground_truth_key\)"),
        ({"prompt": "a", "ground_truth": None}, "null in column 'ground_truth'"),
        ({"prompt": "", "ground_truth": 1}, "the prompt has no tokens"),
        ({"prompt": 3, "ground_truth": 1}, "a string or a list of messages, this is int 3"),
        ({"prompt": [], "ground_truth": 1}, "a string or a list of messages, this is list"),
        ({"prompt": ["a"], "ground_truth": 1}, "message 0 of the prompt is str 'a', not an object"),
        ({"prompt": [{"role": "user"}], "ground_truth": 1}, "message 0 of the prompt has no 'content'"),
    ],
)
def test_bad_rows(write_rows: Write, tokenizer: PreTrainedTokenizerFast, row: dict[str, Any], complaint: str) -> None:
    path = write_rows([{"prompt": "ok", "ground_truth": 1}, row])
    with pytest.raises(DataError, match=rf"rows\.jsonl:2: .*{complaint}"):
        PromptDataset([path], tokenizer, DataConfig())


def test_verl_columns(write_rows: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write_rows([{"prompt": "a", "reward_model": {"style": "rule", "ground_truth": "7"}}])
    dataset = PromptDataset([path], tokenizer, {"ground_truth_key": "reward_model.ground_truth"})
    assert dataset[0].ground_truth == "7"
    assert PromptDataset([path], tokenizer, {"ground_truth_key": None})[0].ground_truth is None


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"promt_key": "x"}, r"there is no key 'data\.promt_key'; did you mean 'data\.prompt_key'\?"),
        ({"zzzz": 1}, "Keys of data: apply_chat_template, .*train_files"),
        ({"truncation": "middle"}, r"data\.truncation must be one of error, left, right, got 'middle'"),
        ({"apply_chat_template": "yes"}, r"data\.apply_chat_template"),
        ({"max_prompt_length": 0}, r"data\.max_prompt_length must be at least 1, got 0"),
        ({"num_workers": -1}, r"data\.num_workers"),
        ({"val_max_samples": 0}, r"data\.val_max_samples"),
    ],
)
def test_bad_config(
    write_rows: Write, tokenizer: PreTrainedTokenizerFast, config: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        PromptDataset([write_rows([{"prompt": "a", "ground_truth": 1}])], tokenizer, config)


def test_batches_travel(write_rows: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    dataset = PromptDataset([write_rows([{"prompt": "ab", "ground_truth": 1}])], tokenizer, DataConfig())
    batch = pickle.loads(pickle.dumps(dataset.collate([dataset[0]])))
    assert list(batch["ground_truth"]) == [1]
