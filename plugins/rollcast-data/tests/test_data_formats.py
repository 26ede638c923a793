"""The column formats of TRL and verl: what each becomes, and the errors of rows that have none of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from rollcast.errors import DataError
from rollcast_data.conversations import ConversationDataset
from rollcast_data.files import read_files, write_parquet
from rollcast_data.messages import read_chat_options, read_messages, read_tools
from rollcast_data.prompts import PromptDataset
from rollcast_data.schemas import DataConfig
from rollcast_data.supervised import SupervisedDataset

Write = Callable[..., Path]
Make = Callable[..., PreTrainedTokenizerFast]
EOS = 1
USER = {"role": "user", "content": "a"}
REPLY = {"role": "assistant", "content": "b"}
SCHEMA = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
#: Shows the names of tools and the option ``style`` before the messages.
SHOWS = (
    "{% for t in tools or [] %}<{{ t.function.name }}>{% endfor %}{{ style or '' }}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def prompt_of(path: Path, tokenizer: PreTrainedTokenizerFast, **config: Any) -> str:
    dataset = PromptDataset([path], tokenizer, {"ground_truth_key": None, **config})
    return str(tokenizer.decode(list(dataset[0].input_ids))).replace("?", "")


@pytest.mark.parametrize("tools", [[SCHEMA], json.dumps([SCHEMA]), [json.dumps(SCHEMA)]], ids=["list", "text", "texts"])
def test_tools_reach_the_template_of_prompts(write_rows: Write, make_tokenizer: Make, tools: Any) -> None:
    path = write_rows([{"prompt": [USER], "tools": tools}])
    assert prompt_of(path, make_tokenizer(SHOWS)) == "add[user]a[assistant]"
    conversation = write_rows([{"messages": [USER, REPLY], "tools": tools}], "messages.jsonl")
    row = ConversationDataset([conversation], make_tokenizer(SHOWS), {})[0]
    assert make_tokenizer(SHOWS).decode(list(row.prompt_ids)).replace("?", "") == "add[user]a[assistant]"


def test_tools_of_parquet_have_no_nulls(tmp_path: Path, make_tokenizer: Make) -> None:
    schemas = [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object", **more}}}
        for name, more in (("add", {}), ("sub", {"required": ["x"]}))
    ]
    write_parquet(tmp_path / "rows.parquet", [{"prompt": [USER], "tools": schemas}])
    dataset = PromptDataset([tmp_path / "rows.parquet"], make_tokenizer(SHOWS), {"ground_truth_key": None})
    assert dataset[0].extra_info == {"tools": schemas}
    template = "{% for t in tools %}{{ 'required' in t.function.parameters }}.{% endfor %}{{ messages[0].content }}"
    assert prompt_of(tmp_path / "rows.parquet", make_tokenizer(template)) == "False.True.a"


def test_template_options_of_row_and_config(write_rows: Write, make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer(SHOWS)
    plain = write_rows([{"prompt": [USER]}])
    config = {"apply_chat_template_kwargs": {"style": "c"}}
    assert prompt_of(plain, tokenizer, **config) == "c[user]a[assistant]"
    for given in ({"style": "d"}, json.dumps({"style": "d"})):
        own = write_rows([{"prompt": [USER], "chat_template_kwargs": given}], "own.jsonl")
        assert prompt_of(own, tokenizer, **config) == "d[user]a[assistant]"
    conversation = write_rows([{"messages": [USER, REPLY], "chat_template_kwargs": {"style": "d"}}], "m.jsonl")
    row = ConversationDataset([conversation], tokenizer, config)[0]
    assert tokenizer.decode(list(row.prompt_ids)) == "d[user]a[assistant]"


def test_text_parts_and_calls_without_text(write_rows: Write, make_tokenizer: Make) -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "add", "arguments": '{"x": 1}'}}],
    }
    dataset = PromptDataset(
        [write_rows([{"prompt": [parts, call, {"role": "tool", "content": "2"}]}])],
        make_tokenizer(SHOWS),
        {"ground_truth_key": None},
    )
    assert dataset[0].raw_prompt == [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"x": 1}}}]},
        {"role": "tool", "content": "2"},
    ]


def test_only_nulls_that_parquet_adds_go(write_rows: Write, tmp_path: Path) -> None:
    """Nulls in JSON are kept, also in the JSON text of a Parquet column; a struct's keys of other rows are left out."""
    given = {"city": "rome", "until": None, "opts": {"a": None}}
    schema = {"function": {"name": "find", "parameters": {"until": {"default": None, "enum": ["x", None]}}}}

    def conversation(arguments: Any) -> list[dict[str, Any]]:
        return [{"role": "assistant", "tool_calls": [{"function": {"name": "find", "arguments": arguments}}]}]

    texts = {"messages": conversation(json.dumps(given)), "tools": json.dumps([schema])}
    structs = [
        {"messages": conversation({"city": "rome"}), "tools": [{"function": {"name": "f", "strict": True}}]},
        {"messages": conversation({"until": 3}), "tools": [{"function": {"name": "g"}}]},
    ]
    for name, rows in (("texts", [texts]), ("structs", structs)):
        write_parquet(tmp_path / f"{name}.parquet", rows)
    found: list[tuple[Any, Any]] = []
    sources = [
        write_rows([texts, {"messages": conversation(given), "tools": [schema]}]),
        tmp_path / "texts.parquet",
        tmp_path / "structs.parquet",
    ]
    for row in read_files(sources):
        (message,) = read_messages(row, row.find("messages"), "messages")
        found.append((message["tool_calls"][0]["function"]["arguments"], read_tools(row, "tools")))
    assert found[:3] == [(given, [schema])] * 3
    assert found[3] == ({"city": "rome"}, structs[0]["tools"])
    assert found[4] == ({"until": 3}, structs[1]["tools"])


def test_null_as_text_is_no_value(write_rows: Write) -> None:
    row = {"tools": "null", "chat_template_kwargs": "null"}
    row["messages"] = [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "null"}}]}]
    (read,) = read_files([write_rows([row])])
    options = read_chat_options(read, DataConfig())
    assert (options.tools, options.kwargs) == ([], {})
    assert read_messages(read, row["messages"], "messages")[0]["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize("key", ["response", "completion"])
def test_the_answer_of_supervised_rows(write_rows: Write, chat_tokenizer: PreTrainedTokenizerFast, key: str) -> None:
    """A supervised run validates with its responses as answers, in every form in which they are trained."""
    rows = [{"prompt": "ab", key: "cd"}]
    if key == "completion":
        rows.append({"prompt": [USER], key: [REPLY]})
    dataset = PromptDataset([write_rows(rows)], chat_tokenizer, {"ground_truth_key": "response"})
    assert [dataset[number].ground_truth for number in range(len(rows))] == ["cd", "b"][: len(rows)]


@pytest.mark.parametrize("text", ["<bos>ab", "ab"])
def test_one_bos(write_rows: Write, make_tokenizer: Make, text: str) -> None:
    """A tokenizer that adds BOS does not add it to a text that begins with it, in prompts, responses and texts."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", tokenizer.bos_token_id)]
    )
    prompt = {"prompt": text, "response": "cd", "ground_truth": "1"}
    path = write_rows([prompt])
    assert tokenizer.decode(list(PromptDataset([path], tokenizer, {})[0].input_ids)) == "<bos>ab"
    row = SupervisedDataset([path], tokenizer, {})[0]
    assert tokenizer.decode([*row.prompt_ids, *row.response_ids]) == "<bos>abcd<eos>"
    whole = SupervisedDataset([write_rows([{"text": text}])], tokenizer, {})[0]
    assert tokenizer.decode([*whole.prompt_ids, *whole.response_ids]) == "<bos>ab<eos>"


def test_prompt_and_completion_of_messages(write_rows: Write, chat_tokenizer: PreTrainedTokenizerFast) -> None:
    """The replies of the completion are trained, those of the prompt are not."""
    path = write_rows([{"prompt": [USER, REPLY, USER], "completion": [{**REPLY, "content": "c"}, USER, REPLY]}])
    row = ConversationDataset([path], chat_tokenizer, {})[0]
    assert chat_tokenizer.decode(list(row.prompt_ids)) == "[user]a[assistant]b[user]a[assistant]"
    trained = [token for token, is_trained in zip(row.response_ids, row.trained, strict=True) if is_trained]
    assert chat_tokenizer.decode(trained) == "c<eos>b<eos>"


def test_prompt_and_completion_of_texts(write_rows: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    dataset = SupervisedDataset([write_rows([{"prompt": "ab", "completion": "cd"}])], tokenizer, {})
    assert tokenizer.decode([*dataset[0].prompt_ids]) == "ab"
    assert tokenizer.decode([*dataset[0].response_ids]) == "cd<eos>"


def test_a_text_is_trained_as_a_whole(write_rows: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    """All tokens that something predicts, as in a text without a prompt: all but the first."""
    path = write_rows([{"text": "abc"}, {"text": "ab<eos>"}, {"text": "a"}])
    dataset = SupervisedDataset([path], tokenizer, {})
    found = [
        (tokenizer.decode([*row.prompt_ids]), tokenizer.decode([*row.response_ids]))
        for row in map(dataset.__getitem__, range(3))
    ]
    assert found == [("a", "bc<eos>"), ("a", "b<eos>"), ("a", "<eos>")]


def test_rows_of_verl(tmp_path: Path, chat_tokenizer: PreTrainedTokenizerFast) -> None:
    row = {
        "data_source": "gsm8k",
        "prompt": [USER],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "7"},
        "extra_info": {"index": 3, "split": "train"},
    }
    write_parquet(tmp_path / "rows.parquet", [row])
    found = PromptDataset([tmp_path / "rows.parquet"], chat_tokenizer, {})[0]
    assert (found.ground_truth, found.data_source, found.raw_prompt) == ("7", "gsm8k", [USER])
    assert found.extra_info == {"ability": "math", "reward_model": row["reward_model"], "index": 3, "split": "train"}


def test_an_answer_stays_under_its_own_name(write_rows: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write_rows([{"prompt": "a", "solution": "7", "level": 2}])
    found = PromptDataset([path], tokenizer, {"ground_truth_key": "solution"})[0]
    assert found.ground_truth == "7"
    assert found.extra_info == {"solution": "7", "level": 2}


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"prompt": [USER], "tools": "{"}, r"tools: not JSON"),
        (
            {"prompt": [USER], "tools": "3"},
            r"tools \(data\.tools_key\) has to be a list of JSON schemas or its JSON text",
        ),
        (
            {"prompt": [USER], "tools": [{"name": "add"}]},
            r"schema 0 of tools \(data\.tools_key\) is dict .*it has to be",
        ),
        (
            {"prompt": [USER], "chat_template_kwargs": [1]},
            r"chat_template_kwargs has to be a mapping.*this is list \[1\]",
        ),
        (
            {"prompt": [{"from": "human", "value": "a"}]},
            r"its keys: from, value; rename from to role and value to content",
        ),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image"}]}]},
            r"prompt has more images than the 0 of images \(data\.image_key\)",
        ),
    ],
)
def test_bad_prompts(write_rows: Write, make_tokenizer: Make, row: dict[str, Any], complaint: str) -> None:
    path = write_rows([{"prompt": [USER]}, row])
    with pytest.raises(DataError, match=rf"rows\.jsonl:2: .*{complaint}"):
        prompt_of(path, make_tokenizer(SHOWS))


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        ([{"messages": [USER, REPLY]}], r":1: .*no column 'response'.*data=conversations reads messages"),
        ([{"prompt": "a", "chosen": "b", "rejected": "c"}], r":1: .*pairs of chosen and rejected replies"),
        (
            [{"prompt": [USER], "completion": [REPLY]}],
            r":1: completion is a list of messages, which data=conversations",
        ),
        (
            [{"text": "a"}, {"prompt": "a", "response": "b"}],
            r":2: the row has the columns prompt, response, unlike the",
        ),
        ([{"text": ""}], r":1: text is empty"),
        ([{"prompt": "a", "text": "b"}], r":1: .*no column 'response'.*no 'completion' or 'text'"),
    ],
)
def test_bad_supervised_rows(
    write_rows: Write, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, Any]], complaint: str
) -> None:
    with pytest.raises(DataError, match=complaint):
        SupervisedDataset([write_rows(rows)], tokenizer, {})


def test_texts_are_no_conversation(write_rows: Write, chat_tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(DataError, match=r":1: prompt and completion are texts, which data=supervised reads"):
        ConversationDataset([write_rows([{"prompt": "a", "completion": "b"}])], chat_tokenizer, {})
