"""The conformance suite of renderers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from rollcast_agents.contracts.renderer import BaseRenderer, RendererSetup, renderers
from rollcast_agents.prefix import CONVERSATIONS, REPLIES, TOOL, Conversation, extend_each, sampled
from rollcast_data.chat_template import ChatMessage

__all__ = ["RendererSuite"]


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
    replies: ClassVar[Sequence[str]] = REPLIES
    always_extends: ClassVar[bool] = False

    @pytest.fixture
    def model_path(self) -> str:
        """Return the model's folder; override it."""
        pytest.fail(f"{type(self).__name__} needs a fixture model_path, the folder of a tokenizer")

    @pytest.fixture
    def renderer(self, model_path: str) -> BaseRenderer:
        """Return the renderer under test."""
        return renderers.get(self.name)(RendererSetup(model_path, self.tool_format, self.options))

    def conversations(self) -> list[Conversation]:
        """Return prompts, the messages after the first reply, and tools."""
        return list(CONVERSATIONS)

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
        assert not np.array_equal(renderer.start(prompt), renderer.start(prompt, [TOOL]))

    def test_extending_keeps_every_id(self, renderer: BaseRenderer) -> None:
        """Check that an extended context starts with the exact existing ids, or is None."""
        for extension in extend_each(renderer, self.conversations(), self.replies):
            if extension.extended is None:
                assert not self.always_extends, f"the reply {extension.reply!r} was not extended"
                continue
            assert extension.keeps, (
                f"extending the reply {extension.reply!r} by {extension.roles} changed ids that were there"
            )

    def test_a_reply_survives(self, renderer: BaseRenderer) -> None:
        """Check that a plain reply is parsed unchanged, except for whitespace at its ends."""
        assert renderer.parse(sampled(renderer, "four")).text.strip() == "four"

    def test_nothing_sampled_raises(self, renderer: BaseRenderer) -> None:
        """Check that any sampled ids can be parsed: cut, empty and malformed replies."""
        for text in (*self.replies, "<tool_call>", "</think>", "{"):
            ids = sampled(renderer, text)
            for length in range(len(ids) + 1):
                renderer.parse(ids[:length])

    def test_encode_and_decode(self, renderer: BaseRenderer) -> None:
        """Check that plain text survives encoding and decoding."""
        assert renderer.decode(renderer.encode("two and two")) == "two and two"
