from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from rollcast.errors import ConfigError, DataError
from rollcast_data.conversations import ConversationDataset
from rollcast_data.schemas import DataConfig
from rollcast_data.supervised import SupervisedDataset

Write = Callable[..., Path]
Make = Callable[..., PreTrainedTokenizerFast]
EOS = 1


def test_layout(write_rows: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write_rows([{"prompt": "a", "response": "bcd"}, {"prompt": "ab", "response": "c"}])
    dataset = SupervisedDataset([path], tokenizer, DataConfig())
    batch = dataset.collate([dataset[0], dataset[1]])
    a, b, c, d = tokenizer("abcd")["input_ids"]
    assert [row.tolist() for row in batch["prompts"].unbind()] == [[a], [a, b]]
    assert [row.tolist() for row in batch["responses"].unbind()] == [[b, c, d, EOS], [c, EOS]]
    assert [row.tolist() for row in batch["response_mask"].unbind()] == [[True] * 4, [True] * 2]
    assert batch["index"].tolist() == [0, 1]


CHAT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}END{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"


@pytest.mark.parametrize(
    ("end", "ending"),
    [
        ("<end>", "<end>"),  # another token than the tokenizer's end token
        (" <end>\n", " <end>"),
        ("<eos>", "<eos>"),
        ("=<end><eos>\n", "=<end>"),
        ("\n", "<eos>"),  # no special token
        ("", "<eos>"),
    ],
)
def test_a_response_ends_as_the_template_ends_a_reply(
    write_rows: Write, make_tokenizer: Make, end: str, ending: str
) -> None:
    tokenizer = make_tokenizer(CHAT.replace("END", end))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end>"]})
    user, prefill = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    rows = [{"prompt": prompt, "response": "cd"} for prompt in ([user], [user, prefill], "a")]

    def texts(**config: str) -> list[str]:
        dataset = SupervisedDataset([write_rows(rows)], tokenizer, config)
        return [str(tokenizer.decode(list(dataset[number].response_ids))) for number in range(len(dataset))]

    assert texts() == [f"cd{ending}", f"cd{ending}", "cd<eos>"]
    assert texts(apply_chat_template="always") == [f"cd{ending}"] * 3
    assert texts(apply_chat_template="never") == ["cd<eos>"] * 3
    # What is trained is what data=conversations trains for the same conversation.
    talk = write_rows([{"messages": [user, {"role": "assistant", "content": "cd"}]}])
    assert str(tokenizer.decode(list(ConversationDataset([talk], tokenizer, {})[0].response_ids))) == f"cd{ending}"


def test_an_empty_response_is_its_end_token(write_rows: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    dataset = SupervisedDataset([write_rows([{"prompt": "a", "response": ""}])], tokenizer, DataConfig())
    assert dataset.collate([dataset[0]])["responses"].unbind()[0].tolist() == [EOS]


def test_overlong_responses(write_rows: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write_rows([{"prompt": "a", "response": "bc"}, {"prompt": "a", "response": "bcd"}])
    with pytest.raises(DataError, match=r"rows\.jsonl:2: the response has 4 tokens .*max_response_length=3"):
        SupervisedDataset([path], tokenizer, {"max_response_length": 3})
    cut = SupervisedDataset([path], tokenizer, {"max_response_length": 3, "truncation": "right"})
    assert [tokenizer.decode(list(cut[i].response_ids)) for i in (0, 1)] == ["bc<eos>", "bcd"]


def test_filtered_rows_keep_prompt_and_response_together(write_rows: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write_rows([{"prompt": "aaaa", "response": "x"}, {"prompt": "b", "response": "y"}])
    dataset = SupervisedDataset([path], tokenizer, {"max_prompt_length": 2})
    assert len(dataset) == 1
    assert tokenizer.decode(list(dataset[0].response_ids)) == "y<eos>"


def test_bad_rows(write_rows: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl:1: .*no column 'response' \(data\.response_key\)"):
        SupervisedDataset([write_rows([{"prompt": "a"}])], tokenizer, DataConfig())
    with pytest.raises(DataError, match=r"a response \(response\) is a string, this is int"):
        SupervisedDataset([write_rows([{"prompt": "a", "response": 3}])], tokenizer, DataConfig())


@pytest.mark.parametrize("missing", ["pad", "eos"])
def test_tokenizers_that_lack_a_token(write_rows: Write, make_tokenizer: Make, missing: str) -> None:
    tokenizer = make_tokenizer(pad=missing != "pad", eos=missing != "eos")
    with pytest.raises(ConfigError, match=f"no {'pad' if missing == 'pad' else 'end'} token"):
        SupervisedDataset([write_rows([{"prompt": "a", "response": "b"}])], tokenizer, DataConfig())
