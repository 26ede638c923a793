"""The renderer ``chat_template``: any Hugging Face chat template, with a check that extending keeps all tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from jinja2.exceptions import TemplateError
from transformers import AutoTokenizer

from rollcast.contracts.renderer import BaseRenderer, ChatMessage, Message, RendererSetup, ToolSchema
from rollcast.contracts.trajectory import Tokens
from rollcast.errors import RendererError
from rollcast_agents.chat import for_template
from rollcast_agents.tool_formats import tool_format

__all__ = ["ChatTemplateRenderer", "split_reasoning"]

_MARK = "rollcast-mark"
_THINK = re.compile(r"\A\s*(?:<think>)?(.*?)</think>\s*", re.DOTALL)


def split_reasoning(text: str) -> tuple[str, str]:
    """Return the thinking before ``</think>`` and the text after it."""
    match = _THINK.match(text)
    return (match[1].strip(), text[match.end() :]) if match else ("", text)


class ChatTemplateRenderer(BaseRenderer):
    """A renderer that uses the tokenizer's chat template; options are passed to the template.

    A conversation is extended by text: the template renders it up to the last reply, and as a whole. If the second text
    starts with the first, the rest is tokenized separately and appended to the existing ids. Otherwise, as with
    templates that drop earlier thinking, the tokens may differ and the session forks.
    """

    def __init__(self, setup: RendererSetup) -> None:
        super().__init__(setup)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(setup.model_path)
        if not getattr(self._tokenizer, "chat_template", None):
            raise RendererError(
                f"agent.renderer=chat_template: the tokenizer in {setup.model_path} has no chat template; choose "
                "another renderer, or a model with one"
            )
        self._parse_calls = tool_format(setup.tool_format or "hermes")

    # ---- rendering ----

    def _text(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema], prompt: bool) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                for_template(messages),
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=prompt,
                **self.setup.options,
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            if isinstance(error, RendererError):
                raise
            raise RendererError(
                f"the chat template of {self.setup.model_path} refuses the messages: {error}"
            ) from error
        return text

    def encode(self, text: str) -> Tokens:
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False), np.int32)

    def decode(self, ids: Tokens) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def start(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema] = ()) -> Tokens:
        return self.encode(self._text(messages, tools, prompt=True))

    def extend(self, ids: Tokens, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema] = ()) -> Tokens | None:
        last = max((i for i, message in enumerate(messages) if message.get("role") == "assistant"), default=-1)
        if last < 0 or not len(ids):
            return None
        before = self._text(messages[: last + 1], tools, prompt=False)
        whole = self._text(messages, tools, prompt=True)
        if not before.endswith(self._closing) or not whole.startswith(before):
            return None
        closing = self._closing
        if int(ids[-1]) in self.stop_token_ids:
            # The sampled reply includes its stop token, but not the text that the template writes after that token.
            stop = self._tokenizer.convert_ids_to_tokens(int(ids[-1]))
            closing = closing.removeprefix(stop)
        return np.concatenate([ids, self.encode(closing + whole[len(before) :])])

    @cached_property
    def _closing(self) -> str:
        """Text that the template writes after a reply, such as ``<|im_end|>`` and a line break."""
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _MARK}]
        text = self._text(messages, (), prompt=False)
        return text.rpartition(_MARK)[2]

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        first = self.encode(self._closing)[:1].tolist()
        special = set(self._tokenizer.all_special_ids) | set(self._tokenizer.added_tokens_decoder)
        found = [*(each for each in first if each in special), self._tokenizer.eos_token_id]
        return tuple(dict.fromkeys(int(each) for each in found if each is not None))

    # ---- parsing ----

    def parse(self, ids: Tokens, tools: Sequence[ToolSchema] = ()) -> Message:
        kept = ids[:-1] if len(ids) and int(ids[-1]) in self.stop_token_ids else ids
        reasoning, rest = split_reasoning(self.decode(kept))
        parsed = self._parse_calls(rest, tools)
        return Message(parsed.text, reasoning or parsed.reasoning, parsed.calls)
