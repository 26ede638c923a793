"""Renderers: prefixes that are kept, replies that are read, refusals; the package ``renderers``."""

from __future__ import annotations

import numpy as np
import pytest
from agent_tools import CHATML, FORGETFUL, make_renderer, user, write_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from rollcast.errors import RendererError
from rollcast_agents.chat import as_chat
from rollcast_agents.contracts.renderer import RendererSetup
from rollcast_agents.renderers.chat_template import ChatTemplateRenderer
from rollcast_agents.renderers.library import LibraryRenderer


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    return make_renderer(tmp_path_factory.mktemp("tokenizer"))


@settings(max_examples=40, deadline=None)
@given(
    said=st.text("abc <>{}", max_size=20),
    more=st.lists(st.sampled_from([user("go on"), {"role": "tool", "content": "42"}]), min_size=1, max_size=3),
    cut=st.booleans(),
)
def test_extending_keeps_every_id_and_says_what_the_template_says(renderer, said, more, cut):
    prompt = [user("hello")]
    reply = renderer.encode(said) if cut else np.append(renderer.encode(said), renderer.stop_token_ids[0])
    ids = np.concatenate([renderer.start(prompt), reply]).astype(np.int32)
    messages = [*prompt, as_chat(renderer.parse(reply)), *more]
    extended = renderer.extend(ids, messages)
    assert extended.dtype == np.int32
    assert np.array_equal(extended[: len(ids)], ids)
    ending = renderer.decode(extended[len(ids) :])
    assert renderer.decode(renderer.start(messages)).endswith(ending.removeprefix("<|im_end|>"))
    assert ending.count("<|im_end|>") == len(more) + cut


def test_a_reply_is_read_with_thinking_and_calls(renderer):
    text = '<think>\nhm\n</think>\n\nSure.\n<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    message = renderer.parse(np.append(renderer.encode(text), renderer.stop_token_ids[0]))
    assert (message.reasoning, message.text) == ("hm", "Sure.")
    assert [call.name for call in message.tool_calls] == ["f"]


def test_a_template_that_refuses_is_named(tmp_path):
    strict = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(RendererError, match="roles must alternate"):
        make_renderer(tmp_path, strict).start([user("hi")])


def test_a_tokenizer_without_a_template_is_refused(tmp_path):
    path = write_tokenizer(tmp_path, None)
    with pytest.raises(RendererError, match="no chat template"):
        ChatTemplateRenderer(RendererSetup(path))


def test_options_reach_the_template(tmp_path):
    template = CHATML + "{%- if greeting is defined %}{{ greeting }}{% endif %}"
    renderer = make_renderer(tmp_path, template, greeting="ahoy")
    assert renderer.decode(renderer.start([user("hi")])).endswith("ahoy")


def test_a_forgetful_template_is_not_extended_behind_thinking(tmp_path):
    renderer = make_renderer(tmp_path, FORGETFUL)
    prompt = [user("hi")]
    reply = np.append(renderer.encode("<think>a</think>b"), renderer.stop_token_ids[0])
    ids = np.concatenate([renderer.start(prompt), reply]).astype(np.int32)
    messages = [*prompt, as_chat(renderer.parse(reply)), user("more")]
    assert renderer.extend(ids, messages) is None
    plain = np.append(renderer.encode("b"), renderer.stop_token_ids[0])
    ids = np.concatenate([renderer.start(prompt), plain]).astype(np.int32)
    assert renderer.extend(ids, [*prompt, as_chat(renderer.parse(plain)), user("more")]) is not None


def test_the_public_package_renders_its_families(tmp_path):
    pytest.importorskip("renderers")
    markers = [f"<{close}{name}>" for name in ("tool_call", "tool_response", "think") for close in ("", "/")]
    path = write_tokenizer(tmp_path, further=markers)
    renderer = LibraryRenderer(RendererSetup(path, options={"name": "qwen3"}))
    prompt = [user("hello")]
    start = renderer.start(prompt)
    assert renderer.decode(start).startswith("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")
    reply = np.append(renderer.encode("one"), renderer.stop_token_ids[0])
    ids = np.concatenate([start, reply]).astype(np.int32)
    message = renderer.parse(reply)
    assert message.text == "one"
    extended = renderer.extend(ids, [*prompt, as_chat(message), {"role": "tool", "content": "42"}])
    assert np.array_equal(extended[: len(ids)], ids)
    assert "42" in renderer.decode(extended[len(ids) :])


def test_an_unknown_family_is_refused(tmp_path):
    pytest.importorskip("renderers")
    with pytest.raises(RendererError, match="bogus"):
        LibraryRenderer(RendererSetup(write_tokenizer(tmp_path), options={"name": "bogus"}))
