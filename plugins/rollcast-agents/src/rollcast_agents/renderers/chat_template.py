"""The renderer ``chat_template``: any Hugging Face chat template, with a check that extending keeps all tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np

from rollcast.errors import RendererError
from rollcast_agents.chat import for_template
from rollcast_agents.contracts.renderer import BaseRenderer, Message, RendererSetup
from rollcast_agents.contracts.trajectory import Tokens
from rollcast_agents.tool_formats import tool_format
from rollcast_data.chat_template import ChatMessage, ChatTemplate, ToolSchema, join_replies
from rollcast_data.tokenizer import read_tokenizer

__all__ = ["ChatTemplateRenderer", "split_reasoning"]

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
        self._tokenizer: Any = read_tokenizer(setup.model_path, setup.trust_remote_code)
        self._template = ChatTemplate(self._tokenizer, "agent.renderer=chat_template")
        self._parse_calls = tool_format(setup.tool_format or "hermes")

    # ---- rendering ----

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except RendererError as error:
            raise RendererError(
                f"the chat template of {self.setup.model_path} refuses the messages: {error}"
            ) from error

    def encode(self, text: str) -> Tokens:
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False), np.int32)

    def decode(self, ids: Tokens) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def start(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema] = ()) -> Tokens:
        plain = join_replies(for_template(messages))
        with self._named():
            return self.encode(self._template.prompt(plain, tools, self.setup.options))

    def extend(self, ids: Tokens, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema] = ()) -> Tokens | None:
        plain, options = join_replies(for_template(messages)), self.setup.options
        # A last message of the assistant is a prefill of the next reply, not the reply that ``ids`` end with.
        known = plain[:-1] if plain and plain[-1]["role"] == "assistant" else plain
        last = max((i for i, message in enumerate(known) if message["role"] == "assistant"), default=-1)
        if last < 0 or not len(ids):
            return None
        with self._named():
            before = self._template.unclosed(plain[: last + 1], tools, options)
            whole = self._template.prompt(plain, tools, options)
            ending = self._template.closing(options).ending
        if before is None or not whole.startswith(before):
            return None
        more = whole[len(before) :]
        if int(ids[-1]) in self.stop_token_ids:
            # The sampled reply has its stop token, but not the text that the template writes after that token.
            blank, stop, behind = more.partition(str(self._tokenizer.convert_ids_to_tokens(int(ids[-1]))))
            if stop and (not blank.strip() or blank + stop == ending):
                more = behind
        return np.concatenate([ids, self.encode(more)])

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        with self._named():
            stop = self._template.closing(self.setup.options).stop
        stop_ids = [self._tokenizer.convert_tokens_to_ids(stop) if stop else None, self._tokenizer.eos_token_id]
        return tuple(dict.fromkeys(int(token) for token in stop_ids if token is not None))

    # ---- parsing ----

    def parse(self, ids: Tokens, tools: Sequence[ToolSchema] = ()) -> Message:
        context = ids[:-1] if len(ids) and int(ids[-1]) in self.stop_token_ids else ids
        reasoning, rest = split_reasoning(self.decode(context))
        parsed = self._parse_calls(rest, tools)
        return Message(parsed.text, reasoning or parsed.reasoning, parsed.calls)
