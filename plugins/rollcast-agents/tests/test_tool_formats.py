"""Tool-call formats: what models write, well-formed and not."""
# ruff: noqa: RUF001

from __future__ import annotations

import json

import pytest
from agent_tools import write_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from rollcast.errors import RendererError
from rollcast_agents.contracts.renderer import RendererSetup
from rollcast_agents.renderers.library import LibraryRenderer
from rollcast_agents.tool_formats import FORMATS, tool_format

CALL = '{"name": "add", "arguments": {"a": 1, "b": "x"}}'
DEEP = "[" * 100_000
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}},
    }
    for name in ("add", "sub")
]
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
    ("pythonic", "<|python_tag|>[1 + 1]"),
    ("pythonic", "[add(a=open('x'))]"),
    ("mistral", "[TOOL_CALLS]add 1"),
    ("deepseek", "<｜tool▁call▁begin｜>add<｜tool▁call▁end｜>"),
    ("gpt-oss", "<|channel|>commentary to=functions.add<|message|>{1}<|call|>"),
]


@pytest.mark.parametrize(("name", "text", "rest"), WELL_FORMED)
def test_a_well_formed_call_is_read_and_cut_out(name, text, rest):
    parsed = tool_format(name)(text, TOOLS)
    (call,) = parsed.calls
    assert (call.name, call.arguments, call.error) == ("add", {"a": 1, "b": "x"}, "")
    assert call.call_id
    assert parsed.text == rest


@pytest.mark.parametrize(("name", "text"), MALFORMED)
def test_a_malformed_call_has_an_error_for_the_model_and_stays_in_the_text(name, text):
    parsed = tool_format(name)(text, TOOLS)
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
        calls = tool_format(name)(text, TOOLS).calls
        assert [call.name for call in calls] == ["add", "sub"], name
        assert len({call.call_id for call in calls}) == 2


def test_harmony_tells_thinking_from_the_answer():
    parsed = tool_format("gpt-oss")(
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>42<|return|>",
        TOOLS,
    )
    assert (parsed.reasoning, parsed.text, parsed.calls) == ("hm", "42", ())


def test_an_unknown_format_names_those_that_exist():
    with pytest.raises(RendererError, match="hermes"):
        tool_format("hermez")


@given(name=st.sampled_from(sorted(FORMATS)), text=st.text(max_size=60))
def test_no_text_raises(name, text):
    for marked in (text, f"<tool_call>{text}</tool_call>", f"[TOOL_CALLS]{text}", f"[{text}]", f"{{{text}"):
        for call in tool_format(name)(marked, TOOLS).calls:
            assert call.error or call.name


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**9), 10**9)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(
    answer=st.lists(JSON, max_size=4)
    | st.dictionaries(st.sampled_from(["name", "age", "parameters", "x"]) | st.text(max_size=4), JSON, max_size=4),
    name=st.sampled_from(sorted(FORMATS)),
)
def test_a_json_answer_is_never_a_call(answer, name):
    text = json.dumps(answer, ensure_ascii=False)
    assert tool_format(name)(text, TOOLS) == (text, (), "")


@pytest.mark.parametrize("name", ["llama3_json", "pythonic"])
@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Ada", "parameters": 3}',
        '{"name": "add", "age": 3}',
        '{"name":',
        "[1, 2",
        "[f(x) for x in y]",
        "[Ada(a=1)]",
    ],
)
def test_an_answer_that_looks_like_a_call_of_no_tool_is_text(name, text):
    assert tool_format(name)(text, TOOLS) == (text, (), "")


def plain(value):
    """Return a value's text as Qwen3-Coder's template writes it."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else str(value)


TEXT = st.text(max_size=20).filter(lambda text: "<" not in text and text == text.strip("\n"))
LOOKS_LIKE_JSON = ['{"a": 1}', "[1, 2]", "true", "null", "1.10", "1e5", '"quoted"', "007", " plain "]
#: Schema of an argument, and values of it whose text has one meaning.
TYPED = [
    ({"type": "string"}, st.sampled_from(LOOKS_LIKE_JSON) | TEXT),
    ({}, st.sampled_from(LOOKS_LIKE_JSON) | TEXT),
    ({"type": "integer"}, st.integers()),
    ({"type": "number"}, st.floats(allow_nan=False, allow_infinity=False)),
    ({"type": "boolean"}, st.booleans()),
    ({"type": ["object", "null"]}, st.none() | st.dictionaries(st.text("ab", max_size=2), st.integers(), max_size=2)),
    ({"anyOf": [{"type": "array"}, {"type": "null"}]}, st.none() | st.lists(st.text("a1 ", max_size=2), max_size=3)),
    ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, st.integers() | st.sampled_from(["1.10", "true", "[1]"])),
    ({"$ref": "#/$defs/Level"}, st.sampled_from([1, 2])),
    ({"enum": ["1", "2"]}, st.sampled_from(["1", "2"])),
]


@given(data=st.data())
def test_qwen3_coder_gives_arguments_the_types_of_the_schema(data):
    chosen = data.draw(st.lists(st.sampled_from(TYPED), max_size=5))
    arguments = {f"p{place}": data.draw(values) for place, (_, values) in enumerate(chosen)}
    properties = {f"p{place}": schema for place, (schema, _) in enumerate(chosen)}
    parameters = {"properties": properties, "$defs": {"Level": {"enum": [1, 2]}}}
    body = "".join(f"<parameter={key}>\n{plain(value)}\n</parameter>\n" for key, value in arguments.items())
    text = f"<tool_call>\n<function=f>\n{body}</function>\n</tool_call>"
    (call,) = tool_format("qwen3_coder")(text, [{"function": {"name": "f", "parameters": parameters}}]).calls
    assert call.arguments == arguments
    assert [type(value) for value in call.arguments.values()] == [type(value) for value in arguments.values()]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    pytest.importorskip("renderers")
    names = [f"<{close}{name}>" for name in ("tool_call", "tool_response", "think") for close in ("", "/")]
    vision = [f"<|{name}|>" for name in ("vision_start", "vision_end", "image_pad", "video_pad")]
    path = write_tokenizer(tmp_path_factory.mktemp("tokenizer"), further=[*names, *vision])
    return LibraryRenderer(RendererSetup(path, options={"name": "qwen3.5"}))


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_the_public_package_gives_arguments_the_types_of_the_schema(library, data):
    ascii_only = [(schema, values) for schema, values in TYPED if schema not in ({"type": "string"}, {})]
    texts = st.sampled_from([text.strip() for text in LOOKS_LIKE_JSON])  # the package strips white space
    optional = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    kinds = [*ascii_only, ({"type": "string"}, texts), ({}, texts), (optional, st.sampled_from(["1.10", "[1]", None]))]
    chosen = data.draw(st.lists(st.sampled_from(kinds), max_size=5))
    arguments = {f"p{place}": data.draw(values) for place, (_, values) in enumerate(chosen)}
    properties = {f"p{place}": schema for place, (schema, _) in enumerate(chosen)}
    parameters = {"properties": properties, "$defs": {"Level": {"enum": [1, 2]}}}
    body = "".join(f"<parameter={key}>\n{written(value)}\n</parameter>\n" for key, value in arguments.items())
    text = f"</think>\n\n<tool_call>\n<function=f>\n{body}</function>\n</tool_call>"
    (call,) = library.parse(library.encode(text), [{"function": {"name": "f", "parameters": parameters}}]).tool_calls
    assert (call.error, call.arguments) == ("", arguments)
    assert [type(value) for value in call.arguments.values()] == [type(value) for value in arguments.values()]


def written(value):
    return "null" if value is None else plain(value)


@given(arguments=st.dictionaries(st.sampled_from(["a", "b", "c"]), JSON, max_size=3))
def test_formats_with_typed_arguments_keep_them(arguments):
    written = json.dumps(arguments, ensure_ascii=False)
    call = f'{{"name": "add", "parameters": {written}}}'
    literal = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    texts = {
        "llama3_json": call,
        "pythonic": f"[add({literal})]",
        "mistral": f"[TOOL_CALLS]add[ARGS]{written}",
        "gpt-oss": f"<|channel|>commentary to=functions.add<|message|>{json.dumps(arguments)}<|call|>",
    }
    for name, text in texts.items():
        (found,) = tool_format(name)(text, TOOLS).calls
        assert (found.arguments, found.error) == (arguments, ""), name


def test_pythonic_reads_the_names_of_json():
    (call,) = tool_format("pythonic")("[add(a=true, b=[null, false])]", TOOLS).calls
    assert call.arguments == {"a": True, "b": [None, False]}
