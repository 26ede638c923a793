"""Thousands of conversations through the real tokenizer: what is trained is what was sampled, token by token.

Tokens that a model samples are often not those into which their text is encoded again. Nothing may depend on it.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollcast_agents.contracts.renderer import RendererSetup
from rollcast_agents.renderers.chat_template import ChatTemplateRenderer
from rollcast_data.conversations import ConversationDataset
from rollcast_data.prompts import PromptDataset
from rollcast_data.tokenizer import load_tokenizer

pytestmark = pytest.mark.long

COUNT = 5000
PARTS = [
    *(
        "Hello",
        " leading space",
        "  two",
        "\ttab",
        "trailing ",
        "\n\nline",
        "a\r\nb",
        "…",
        "ﬁ ligature",
        "e\u0301 accent",
    ),
    *("naïve", "Größe", "Ελλάδα", "привет", "中文字符", "日本語", "한국어", "עברית", "العربية", "हिन्दी", "ไทย"),
    *("🙂", "👩‍👩‍👧‍👦", "🇫🇷", "\u200b", "\ufeff", "\u00a0", "\U0001d518\U0001d52b", "ﷺ", "\x07"),
    *(
        "def f(x):\n    return x ** 2",
        "```python\nprint('hi')\n```",
        "<b>&amp;</b>",
        "SELECT * FROM t;",
        "$\\frac{1}{2}$",
    ),
    *('{"a": [1, 2.5e-3, null], "b": "\\u00e9"}', "[]", "{}", '"quoted"', "C:\\path\\n", "https://a.b/c?d=e#f"),
    *("31415926535897932384626", "1,000,000.00", "0x1F", "1e-10", "½", "٣", "-7", "007"),
]


def text(draw: random.Random) -> str:
    return draw.choice(["", " "]).join(draw.choices(PARTS, k=draw.randint(1, 5)))


def conversation(draw: random.Random) -> list[dict[str, Any]]:
    messages = [{"role": "system", "content": text(draw)}] if draw.random() < 0.5 else []
    for _ in range(draw.randint(1, 3)):
        messages += [{"role": "user", "content": text(draw)}, {"role": "assistant", "content": text(draw)}]
    return messages


@pytest.fixture(scope="module")
def conversations() -> list[list[dict[str, Any]]]:
    draw = random.Random("conversations")
    return [conversation(draw) for _ in range(COUNT)]


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Any:
    return load_tokenizer(model)


@pytest.fixture(scope="module")
def renderer(model: Path) -> ChatTemplateRenderer:
    return ChatTemplateRenderer(RendererSetup(str(model)))


def rendered(tokenizer: Any, messages: list[dict[str, Any]], opens: bool) -> list[int]:
    """What transformers makes of messages."""
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=opens, tokenize=True, return_dict=True)
    return list(ids["input_ids"])


def test_extending_keeps_sampled_tokens(renderer: Any, tokenizer: Any, conversations: Any) -> None:
    draw = np.random.default_rng(0)
    stop = renderer.stop_token_ids[0]
    differ = 0
    for messages in conversations:
        last = max(i for i, each in enumerate(messages) if each["role"] == "user")
        opening, more = messages[: last + 1], {"role": "user", "content": "and " + messages[0]["content"]}
        start = renderer.start(opening)
        assert start.tolist() == rendered(tokenizer, opening, opens=True)
        # Any ids of the vocabulary, as at a high temperature; every fifth text is encoded otherwise.
        sampled = draw.integers(3, len(tokenizer), int(draw.integers(1, 12)), dtype=np.int32)
        said = renderer.decode(sampled)
        differ += renderer.encode(said).tolist() != sampled.tolist()
        ids = np.concatenate([start, sampled, [stop]]).astype(np.int32)
        extended = renderer.extend(ids, [*opening, {"role": "assistant", "content": said}, more])
        assert extended is not None
        assert np.array_equal(extended[: len(ids)], ids)
        turn = f"\n<|im_start|>user\n{more['content']}<|im_end|>\n<|im_start|>assistant\n"
        assert extended[len(ids) :].tolist() == renderer.encode(turn).tolist()
    assert differ > COUNT / 10


def test_supervised_replies_are_trained_alone_and_whole(tokenizer: Any, conversations: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"messages": each}) + "\n" for each in conversations))
    limits = {"max_prompt_length": 4096, "max_response_length": 4096}
    dataset = ConversationDataset([path], tokenizer, limits)
    assert len(dataset) == COUNT
    for number, messages in enumerate(conversations):
        row = dataset[number]
        trained = [0, *(int(each) for each in row.trained), 0]
        edges = np.flatnonzero(np.diff(trained))
        replies = [row.response_ids[begin:end] for begin, end in zip(edges[::2], edges[1::2], strict=True)]
        expected = [each["content"] + "<|im_end|>" for each in messages if each["role"] == "assistant"]
        assert [tokenizer.decode(list(each)) for each in replies] == expected
        whole = tokenizer.apply_chat_template(messages, tokenize=False)
        assert tokenizer.decode([*row.prompt_ids, *row.response_ids]) + "\n" == whole


def test_prompts_are_those_of_transformers(tokenizer: Any, conversations: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    prompts = [messages[:-1] for messages in conversations]
    path.write_text("".join(json.dumps({"prompt": each, "ground_truth": ""}) + "\n" for each in prompts))
    dataset = PromptDataset([path], tokenizer, {"max_prompt_length": 4096})
    assert [list(dataset[number].input_ids) for number in range(COUNT)] == [
        rendered(tokenizer, each, opens=True) for each in prompts
    ]
