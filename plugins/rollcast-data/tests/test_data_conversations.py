"""The dataset ``conversations``: which tokens of several turns are trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from rollcast.errors import ConfigError, DataError
from rollcast_data.conversations import ConversationDataset
from rollcast_data.files import write_parquet

Write = Callable[..., Path]
Make = Callable[..., PreTrainedTokenizerFast]

#: Ends each message with a stop token and a line break, as Qwen's template does.
STOPS = (
    "{% for tool in tools or [] %}[tools]{{ tool.function.name }}<eos>\n{% endfor %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for call in m.tool_calls or [] %}+{{ call.function.name }}={{ call.function.arguments.x }}{% endfor %}"
    "<eos>\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
#: Writes the thinking of the last reply only.
FORGETS = STOPS.replace(
    "{{ m.content }}", "{% if loop.last and m.thinking %}{{ m.thinking }}={% endif %}{{ m.content }}"
)
CALL = {"type": "function", "function": {"name": "add", "arguments": '{"x": 3}'}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "four"},
]
TOOLS = [{"type": "function", "function": {"name": "add"}}]
TALK = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"))]
TALK.append({"role": "assistant", "content": "d"})


def shown(dataset: ConversationDataset, tokenizer: PreTrainedTokenizerFast) -> list[tuple[str, list[str]]]:
    """The prompt of each row, and the runs of its trained tokens as text in brackets, others without."""
    rows = []
    for number in range(len(dataset)):
        row = dataset[number]
        runs: list[tuple[bool, list[int]]] = []
        for token, trained in zip(row.response_ids, row.trained, strict=True):
            if not runs or runs[-1][0] != trained:
                runs.append((trained, []))
            runs[-1][1].append(token)
        texts = [f"<{tokenizer.decode(ids)}>" if trained else str(tokenizer.decode(ids)) for trained, ids in runs]
        rows.append((str(tokenizer.decode(list(row.prompt_ids))), texts))
    return rows


def test_replies_with_their_stop_tokens_are_trained(write_rows: Write, make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer(STOPS)
    dataset = ConversationDataset([write_rows([{"messages": MESSAGES, "tools": TOOLS}])], tokenizer, {})
    prompt, texts = shown(dataset, tokenizer)[0]
    assert prompt == "[tools]add<eos>\n[user]one<eos>\n[assistant]"
    assert texts == ["<+add=3<eos>>", "\n[tool]4<eos>\n[assistant]", "<four<eos>>"]
    batch = dataset.collate([dataset[0]])
    assert batch["responses"].unbind()[0].tolist() == list(dataset[0].response_ids)
    assert batch["response_mask"].unbind()[0].tolist() == list(dataset[0].trained)


def test_an_end_token_follows_where_the_template_writes_none(
    write_rows: Write, chat_tokenizer: PreTrainedTokenizerFast
) -> None:
    dataset = ConversationDataset([write_rows([{"messages": TALK}])], chat_tokenizer, {})
    assert shown(dataset, chat_tokenizer) == [("[user]a[assistant]", ["<b<eos>>", "[user]c[assistant]", "<d<eos>>"])]


def test_a_template_may_stop_with_another_token_than_the_end_token(write_rows: Write, make_tokenizer: Make) -> None:
    """As Qwen's base models: the line break behind the stop token is never sampled, so it is not trained."""
    tokenizer = make_tokenizer(STOPS.replace("<eos>", "<end>"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end>"]})
    dataset = ConversationDataset([write_rows([{"messages": TALK}])], tokenizer, {})
    between = "\n[user]c<end>\n[assistant]"
    assert shown(dataset, tokenizer) == [("[user]a<end>\n[assistant]", ["<b<end>>", between, "<d<end>>"])]


def test_messages_of_weight_0_are_context(write_rows: Write, make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer(STOPS)
    first = [TALK[0], {**TALK[1], "weight": 0}, TALK[2], {**TALK[3], "weight": 1}]
    last = [*TALK[:3], {**TALK[3], "weight": 0}]
    dataset = ConversationDataset([write_rows([{"messages": first}, {"messages": last}])], tokenizer, {})
    assert shown(dataset, tokenizer) == [
        ("[user]a<eos>\n[assistant]b<eos>\n[user]c<eos>\n[assistant]", ["<d<eos>>"]),
        ("[user]a<eos>\n[assistant]", ["<b<eos>>"]),
    ]


def test_a_template_that_forgets_makes_a_row_of_each_reply(write_rows: Write, make_tokenizer: Make) -> None:
    """The first reply is not trained behind a text that lacks its thinking, nor the second behind one that has it."""
    tokenizer = make_tokenizer(FORGETS)
    talk = [{**message, "thinking": "t"} if message["role"] == "assistant" else message for message in TALK]
    dataset = ConversationDataset([write_rows([{"messages": talk}])], tokenizer, {})
    assert shown(dataset, tokenizer) == [
        ("[user]a<eos>\n[assistant]", ["<t=b<eos>>"]),
        ("[user]a<eos>\n[assistant]b<eos>\n[user]c<eos>\n[assistant]", ["<t=d<eos>>"]),
    ]


def test_parquet_gives_the_same_rows(write_rows: Write, make_tokenizer: Make, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(STOPS)
    rows = [{"messages": MESSAGES, "tools": json.dumps(TOOLS)}, {"messages": TALK}]
    write_parquet(tmp_path / "rows.parquet", rows)
    read = [
        shown(ConversationDataset([path], tokenizer, {}), tokenizer)
        for path in (write_rows(rows), tmp_path / "rows.parquet")
    ]
    assert read[0] == read[1]
    assert len(read[0]) == 2


def test_long_conversations(write_rows: Write, chat_tokenizer: PreTrainedTokenizerFast) -> None:
    path = write_rows([{"messages": TALK[:2]}, {"messages": TALK}])
    with pytest.raises(DataError, match=r"rows\.jsonl:2: the conversation has 22 tokens .*max_response_length=3"):
        ConversationDataset([path], chat_tokenizer, {"max_response_length": 3})
    cut = ConversationDataset([path], chat_tokenizer, {"max_response_length": 3, "truncation": "right"})
    assert [texts for _, texts in shown(cut, chat_tokenizer)] == [["<b<eos>>"], ["<b<eos>>", "["]]
    longer = [{"role": "user", "content": "aaaa"}, TALK[1]]
    path = write_rows([{"messages": longer}, {"messages": TALK[:2]}])
    kept = ConversationDataset([path], chat_tokenizer, {"max_prompt_length": 18})
    assert shown(kept, chat_tokenizer) == [("[user]a[assistant]", ["<b<eos>>"])]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a"}, r"no column 'messages' \(data\.messages_key\)"),
        ({"messages": []}, "messages has to be a list of messages"),
        ({"messages": ["a"]}, "message 0 of messages is str 'a', not an object with role and content"),
        (
            {"messages": [{"role": "user", "content": 3}]},
            "message 0 of messages has no 'content' that is a string or a list of text parts, this is int 3",
        ),
        ({"messages": TALK[:1]}, "no message of the conversation is a reply to train"),
        ({"messages": [TALK[0], {**TALK[1], "weight": 0.5}]}, r"message 1 has the weight 0\.5; valid: 0, 1"),
        ({"messages": [{**TALK[1], "tool_calls": [{"name": "f"}]}]}, r"a tool call without function\.name"),
        (
            {"messages": [{**TALK[1], "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "arguments of message 0 of messages: not JSON",
        ),
        (
            {"messages": TALK, "tools": {"a": 1}},
            r"tools \(data\.tools_key\) has to be a list of JSON schemas or its JSON text, this is dict",
        ),
    ],
)
def test_bad_rows(
    write_rows: Write, chat_tokenizer: PreTrainedTokenizerFast, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=rf"rows\.jsonl:1: .*{message}"):
        ConversationDataset([write_rows([row])], chat_tokenizer, {})


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no') }}", "the chat template refuses the first . messages: TemplateError: no"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}!{% endif %}", "otherwise"),
        ("{% for m in messages %}{{ m.content }}{{ '.' if m.content != 'b' }}{% endfor %}", "ends it with 'b'"),
    ],
)
def test_templates_that_hide_the_reply(write_rows: Write, make_tokenizer: Make, template: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        ConversationDataset([write_rows([{"messages": TALK}])], make_tokenizer(template), {})


def test_tokenizers_and_settings_that_do_not_fit(
    write_rows: Write, tokenizer: PreTrainedTokenizerFast, make_tokenizer: Make
) -> None:
    path = write_rows([{"messages": TALK}])
    with pytest.raises(ConfigError, match="the tokenizer has no chat template"):
        ConversationDataset([path], tokenizer, {})
    with pytest.raises(ConfigError, match=r"data\.apply_chat_template is 'never'"):
        ConversationDataset([path], make_tokenizer(STOPS), {"apply_chat_template": "never"})
    with pytest.raises(ConfigError, match="no end token"):
        ConversationDataset([path], make_tokenizer(STOPS, eos=False), {})
