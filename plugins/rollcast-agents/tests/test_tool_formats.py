"""Tool-call formats: what models write, well-formed and not."""
# ruff: noqa: RUF001

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollcast.errors import RendererError
from rollcast_agents.tool_formats import FORMATS, tool_format

CALL = '{"name": "add", "arguments": {"a": 1, "b": "x"}}'
DEEP = "[" * 100_000
WELL_FORMED = [
    ("hermes", f"Let me see.\n<tool_call>\n{CALL}\n</tool_call>", "Let me see."),
    (
        "qwen3_coder",
        "Let me see.\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx\n</parameter>\n</function>\n</tool_call>",
        "Let me see.",
    ),
    ("llama3_json", CALL.replace("arguments", "parameters"), ""),
    ("llama3_json", "<|python_tag|>" + CALL, ""),
    ("pythonic", "[add(a=1, b='x')]", ""),
    ("mistral", f"Let me see.[TOOL_CALLS][{CALL}]", "Let me see."),
    ("mistral", 'Let me see.[TOOL_CALLS]add[ARGS]{"a": 1, "b": "x"}', "Let me see."),
    (
        "deepseek",
        'Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 1, "b": "x"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "Let me see.",
    ),
    (
        "deepseek",
        'Let me see.<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1, "b": "x"}<｜tool▁call▁end｜>',
        "Let me see.",
    ),
    ("gpt-oss", '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1, "b": "x"}<|call|>', ""),
]
MALFORMED = [
    ("hermes", "<tool_call>{not json</tool_call>"),
    ("hermes", '<tool_call>{"name": "add"'),
    ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
    ("hermes", f"<tool_call>{DEEP}</tool_call>"),
    ("qwen3_coder", "<tool_call>add(1)</tool_call>"),
    ("llama3_json", '{"name": "add", "parameters": '),
    ("pythonic", "[add(1, 2)]"),
    ("pythonic", "[add(a=1"),
    ("pythonic", "[1 + 1]"),
    ("pythonic", "[add(a=open('x'))]"),
    ("mistral", "[TOOL_CALLS]add 1"),
    ("deepseek", "<｜tool▁call▁begin｜>add<｜tool▁call▁end｜>"),
    ("gpt-oss", "<|channel|>commentary to=functions.add<|message|>{1}<|call|>"),
]


@pytest.mark.parametrize(("name", "text", "rest"), WELL_FORMED)
def test_a_well_formed_call_is_read_and_cut_out(name, text, rest):
    parsed = tool_format(name)(text)
    (call,) = parsed.calls
    assert (call.name, call.arguments, call.error) == ("add", {"a": 1, "b": "x"}, "")
    assert call.call_id
    assert parsed.text == rest


@pytest.mark.parametrize(("name", "text"), MALFORMED)
def test_a_malformed_call_has_an_error_for_the_model_and_stays_in_the_text(name, text):
    parsed = tool_format(name)(text)
    assert [bool(call.error) for call in parsed.calls] == [True]
    assert parsed.text


def test_several_calls_keep_their_order():
    two = CALL.replace("add", "sub")
    texts = {
        "hermes": f"<tool_call>{CALL}</tool_call>\n<tool_call>{two}</tool_call>",
        "llama3_json": f"{CALL}; {two}",
        "pythonic": "[add(a=1), sub(a=2)]",
        "mistral": f"[TOOL_CALLS][{CALL}, {two}]",
    }
    for name, text in texts.items():
        calls = tool_format(name)(text).calls
        assert [call.name for call in calls] == ["add", "sub"], name
        assert len({call.call_id for call in calls}) == 2


def test_harmony_tells_thinking_from_the_answer():
    parsed = tool_format("gpt-oss")(
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>42<|return|>"
    )
    assert (parsed.reasoning, parsed.text, parsed.calls) == ("hm", "42", ())


def test_an_unknown_format_names_those_that_exist():
    with pytest.raises(RendererError, match="hermes"):
        tool_format("hermez")


@given(name=st.sampled_from(sorted(FORMATS)), text=st.text(max_size=60))
def test_no_text_raises(name, text):
    for marked in (text, f"<tool_call>{text}</tool_call>", f"[TOOL_CALLS]{text}", f"[{text}]", f"{{{text}"):
        for call in tool_format(name)(marked).calls:
            assert call.error or call.name
