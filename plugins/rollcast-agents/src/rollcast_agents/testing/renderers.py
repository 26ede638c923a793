"""The conformance suite of renderers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from rollcast.contracts.renderer import BaseRenderer, ChatMessage, RendererSetup, ToolSchema, renderers
from rollcast.contracts.trajectory import Tokens
from rollcast_agents.chat import as_chat

__all__ = ["RendererSuite"]

_TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}


class RendererSuite:
    """Checks for renderers; subclass it, set the renderer's name and override the fixture ``model_path``.

    Attributes:
        name: registry name of the renderer in ``rollcast.renderers``.
        options: its ``agent.renderer_kwargs``.
        tool_format: its ``agent.format``.
        replies: texts that the model may sample; a stop token is appended to each.
        always_extends: True if the template is stable, so that ``extend`` may never return None.
    """

    name: ClassVar[str] = ""
    options: ClassVar[Mapping[str, Any]] = {}
    tool_format: ClassVar[str] = ""
    replies: ClassVar[Sequence[str]] = ("four", "", " two  spaces\n", "<tool_call>{")
    always_extends: ClassVar[bool] = False

    @pytest.fixture
    def model_path(self) -> str:
        """Return the model's folder; override it."""
        pytest.fail(f"{type(self).__name__} needs a fixture model_path, the folder of a tokenizer")

    @pytest.fixture
    def renderer(self, model_path: str) -> BaseRenderer:
        """Return the renderer under test."""
        return renderers.get(self.name)(RendererSetup(model_path, self.tool_format, self.options))

    def conversations(self) -> list[tuple[list[ChatMessage], list[ChatMessage], Sequence[ToolSchema]]]:
        """Return prompts, the messages after the first reply, and tools."""
        prompt: list[ChatMessage] = [{"role": "user", "content": "2+2?"}]
        system: list[ChatMessage] = [{"role": "system", "content": "Be brief."}, *prompt]
        user: ChatMessage = {"role": "user", "content": "Are you sure?"}
        tool: ChatMessage = {"role": "tool", "content": "4", "name": "add", "tool_call_id": "call_0"}
        return [
            (prompt, [user], ()),
            (system, [user], ()),
            (prompt, [tool], (_TOOL,)),
            (prompt, [tool, user], (_TOOL,)),
        ]

    def test_stop_tokens(self, renderer: BaseRenderer) -> None:
        """Check that there is a token that ends a reply."""
        assert renderer.stop_token_ids

    def test_ids_are_arrays(self, renderer: BaseRenderer) -> None:
        """Check that ids are one-dimensional int32 arrays, the same each time."""
        for prompt, _, tools in self.conversations():
            ids = renderer.start(prompt, tools)
            assert ids.dtype == np.int32
            assert ids.ndim == 1
            assert len(ids)
            assert np.array_equal(ids, renderer.start(prompt, tools))

    def test_tools_are_shown(self, renderer: BaseRenderer) -> None:
        """Check that a tool changes the prompt."""
        prompt: list[ChatMessage] = [{"role": "user", "content": "2+2?"}]
        assert not np.array_equal(renderer.start(prompt), renderer.start(prompt, [_TOOL]))

    def test_extending_keeps_every_id(self, renderer: BaseRenderer) -> None:
        """Check that an extended context starts with the exact existing ids, or is None."""
        for prompt, more, tools in self.conversations():
            for text in self.replies:
                ids = np.concatenate([renderer.start(prompt, tools), self._sampled(renderer, text)])
                reply = renderer.parse(self._sampled(renderer, text))
                extended = renderer.extend(ids, [*prompt, as_chat(reply), *more], tools)
                if extended is None:
                    assert not self.always_extends, f"the reply {text!r} was not extended"
                    continue
                assert np.array_equal(extended[: len(ids)], ids)
                assert len(extended) > len(ids)

    def test_a_reply_survives(self, renderer: BaseRenderer) -> None:
        """Check that a plain reply is parsed unchanged, except for whitespace at its ends."""
        assert renderer.parse(self._sampled(renderer, "four")).text.strip() == "four"

    def test_nothing_sampled_raises(self, renderer: BaseRenderer) -> None:
        """Check that any sampled ids can be parsed: cut, empty and malformed replies."""
        for text in (*self.replies, "<tool_call>", "</think>", "{"):
            ids = self._sampled(renderer, text)
            for length in range(len(ids) + 1):
                renderer.parse(ids[:length])

    def test_encode_and_decode(self, renderer: BaseRenderer) -> None:
        """Check that plain text survives encoding and decoding."""
        assert renderer.decode(renderer.encode("two and two")) == "two and two"

    def _sampled(self, renderer: BaseRenderer, text: str) -> Tokens:
        return np.append(renderer.encode(text), renderer.stop_token_ids[0]).astype(np.int32)
