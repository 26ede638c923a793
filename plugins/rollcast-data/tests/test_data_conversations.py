from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from rollcast.errors import ConfigError, DataError
from rollcast_data.conversations import ConversationDataset
from rollcast_data.schemas import DataConfig

Write = Callable[..., Path]
Make = Callable[..., PreTrainedTokenizerFast]
TEMPLATE = (
    "{% if tools %}t{{ tools | length }}{% endif %}"
    "{% for message in messages %}"
    "{{ message.role[0] }}{{ message.content }}{% if message.role == 'assistant' %}<eos>{% endif %}z"
    "{% endfor %}{% if add_generation_prompt %}a{% endif %}"
)
#: Keeps the last reply's thinking and no other's.
FORGETS = TEMPLATE.replace(
    "message.content", "message.content if loop.last or message.role == 'user' else message.content[1:]"
)


@pytest.fixture
def chat(make_tokenizer: Make) -> PreTrainedTokenizerFast:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def talk(*contents: str, **first: Any) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    messages: list[dict[str, Any]] = [
        {"role": roles[number % 2], "content": content} for number, content in enumerate(contents)
    ]
    messages[1] |= first
    return messages


def read(write_rows: Write, tokenizer: Any, row: dict[str, Any], **config: Any) -> tuple[str, str, str]:
    """Return prompt, response, and the response with a dot for each token that is not trained."""
    dataset = ConversationDataset([write_rows([row])], tokenizer, DataConfig(**config))
    batch = dataset.collate([dataset[0]])
    ids, mask = batch["responses"].unbind()[0].tolist(), batch["response_mask"].unbind()[0].tolist()
    seen = "".join(tokenizer.decode([token]) if trained else "." for token, trained in zip(ids, mask, strict=True))
    return tokenizer.decode(batch["prompts"].unbind()[0].tolist()), tokenizer.decode(ids), seen


def test_replies_are_trained_up_to_their_end_and_nothing_else(write_rows: Write, chat: Any) -> None:
    found = read(write_rows, chat, {"messages": talk("bc", "de", "fg", "h", "left out")})
    assert found == ("ubcza", "de<eos>zufgzah<eos>z", "de<eos>......h<eos>.")


def test_a_reply_of_weight_0_is_read_and_not_trained(write_rows: Write, chat: Any) -> None:
    messages = talk("b", "de", "f", "h", weight=0)
    assert read(write_rows, chat, {"messages": messages}) == ("ubzade<eos>zufza", "h<eos>z", "h<eos>.")
    messages = [*talk("b", "de", "f", "h"), {"role": "user", "content": "g"}, {"role": "assistant", "content": "i"}]
    messages[3]["weight"] = 0
    assert read(write_rows, chat, {"messages": messages})[2] == "de<eos>" + "." * 12 + "i<eos>."


def test_tools_reach_the_template(write_rows: Write, chat: Any) -> None:
    row = {"messages": talk("b", "c"), "functions": [{"type": "function"}]}
    assert read(write_rows, chat, row, tools_key="functions")[0] == "t1ubza".replace(
        "1", chat.decode(chat("1")["input_ids"])
    )


def test_the_tokens_are_those_that_a_model_would_have_been_given(write_rows: Write, chat: Any) -> None:
    messages = talk("b", "c", "d", "e")
    prompt, response, _ = read(write_rows, chat, {"messages": messages})
    assert prompt + response == chat.apply_chat_template(messages, tokenize=False)


def test_a_template_that_rewrites_what_was_said_is_refused(write_rows: Write, chat: Any) -> None:
    chat.chat_template = FORGETS
    path = write_rows([{"messages": talk("bb", "cc", "dd", "ee")}])
    with pytest.raises(DataError, match=r"rows\.jsonl:1: with message 3 .* make a row of each reply"):
        ConversationDataset([path], chat, DataConfig())
    assert read(write_rows, chat, {"messages": talk("bb", "cc", "dd", "ee", weight=0)})[1] == "ee<eos>z"


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ("hello", "a list of messages, this is a str"),
        ([{"role": "user", "content": "b"}], "no message of the role assistant has a weight"),
        ([{"content": "b"}], "message 0 has no 'role'"),
        (talk("b", "c", weight=0.5), r"message 1 has the weight 0\.5"),
    ],
)
def test_bad_rows(write_rows: Write, chat: Any, messages: Any, says: str) -> None:
    with pytest.raises(DataError, match=rf"rows\.jsonl:1: .*{says}"):
        ConversationDataset([write_rows([{"messages": messages}])], chat, DataConfig())


def test_lengths(write_rows: Write, chat: Any) -> None:
    path = write_rows([{"messages": talk("bbbbbb", "c")}, {"messages": talk("b", "cdef")}])
    with pytest.raises(
        DataError, match=r"rows\.jsonl:2: .* 6 tokens from its first trained reply on, .*max_response_length=3"
    ):
        ConversationDataset([path], chat, DataConfig(max_prompt_length=5, max_response_length=3))
    cut = ConversationDataset([path], chat, DataConfig(max_prompt_length=5, max_response_length=3, truncation="right"))
    assert [chat.decode(list(cut[row].response_ids)) for row in range(len(cut))] == ["cde"]
    with pytest.raises(DataError, match=r"rows\.jsonl:1: the messages before the first trained reply have 9 tokens"):
        ConversationDataset([path], chat, DataConfig(max_prompt_length=5, filter_overlong_prompts=False))
    with pytest.raises(DataError, match="no row is left"):
        ConversationDataset([path], chat, DataConfig(max_prompt_length=1))


def test_a_tokenizer_without_a_template_is_refused(write_rows: Write, make_tokenizer: Make) -> None:
    with pytest.raises(ConfigError, match="a tokenizer with a chat template"):
        ConversationDataset([write_rows([{"messages": talk("b", "c")}])], make_tokenizer(), DataConfig())
