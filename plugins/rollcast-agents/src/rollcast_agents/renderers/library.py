"""The renderer ``library``: model families that the public package ``renderers`` covers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rollcast.errors import RendererError
from rollcast_agents.chat import for_template
from rollcast_agents.contracts.renderer import BaseRenderer, Message, RendererSetup
from rollcast_agents.contracts.trajectory import Tokens
from rollcast_agents.tool_formats import arguments_by_schema, tool_parameters
from rollcast_data.chat_template import ChatMessage, ToolCall, ToolSchema
from rollcast_data.tokenizer import read_tokenizer

__all__ = ["LibraryRenderer"]


class LibraryRenderer(BaseRenderer):
    """A renderer that uses the package ``renderers`` (``pip install "rollcast-agents[renderers]"``).

    The option ``name`` selects a family, such as ``qwen3``; without it the package finds the family by the tokenizer's
    name. Other options are the family's own, such as ``enable_thinking``.

    Raises:
        RendererError: the package is missing, or has no such family or option.
    """

    def __init__(self, setup: RendererSetup) -> None:
        super().__init__(setup)
        try:
            import renderers
            from renderers.configs import config_from_name
        except ImportError as error:
            raise RendererError(
                f'agent.renderer=library needs a package: pip install "rollcast-agents[renderers]" ({error})'
            ) from error
        options = dict(setup.options)
        name = options.pop("name", None)
        self._tokenizer: Any = read_tokenizer(setup.model_path, setup.trust_remote_code)
        try:
            chosen = None if name is None else config_from_name(name)
            self._renderer: Any = renderers.create_renderer(
                self._tokenizer, chosen, chat_template_kwargs=options or None
            )
        except Exception as error:  # the package's errors have no common class
            raise RendererError(f"agent.renderer=library, {name or self._tokenizer.name_or_path!r}: {error}") from error

    def start(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema] = ()) -> Tokens:
        _refuse_prefill(messages)
        return self._checked(
            self._renderer.render_ids, for_template(messages), tools=_specs(tools), add_generation_prompt=True
        )

    def extend(self, ids: Tokens, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema] = ()) -> Tokens | None:
        _refuse_prefill(messages)
        plain = for_template(messages)
        last = max((i for i, message in enumerate(plain) if message["role"] == "assistant"), default=-1)
        prompt, reply = self._split(ids)
        rendered = self._renderer.bridge_to_next_turn(prompt, reply, plain[last + 1 :], tools=_specs(tools))
        if rendered is None:
            return None
        extended = np.asarray(rendered.token_ids, np.int32)
        return extended if np.array_equal(extended[: len(ids)], ids) else None

    def _split(self, ids: Tokens) -> tuple[list[int], list[int]]:
        # The package uses the start of the reply only to trim its end, so any split before its last token works.
        return ids[:-1].tolist(), ids[-1:].tolist()

    def parse(self, ids: Tokens, tools: Sequence[ToolSchema] = ()) -> Message:
        parsed = self._renderer.parse_response(ids.tolist(), tools=_specs(tools))
        tool_calls = list(parsed.tool_calls or ())
        if tool_calls and tools:
            as_text = self._renderer.parse_response(ids.tolist(), tools=_text_specs(tools)).tool_calls
            schemas = tool_parameters(tools)
            tool_calls = [_typed(call, text, schemas) for call, text in zip(tool_calls, as_text, strict=True)]
        calls = tuple(_call(number, call) for number, call in enumerate(tool_calls))
        return Message(parsed.content or "", parsed.reasoning_content or "", calls)

    def encode(self, text: str) -> Tokens:
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False), np.int32)

    def decode(self, ids: Tokens) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return tuple(int(token) for token in self._renderer.get_stop_token_ids())

    def _checked(self, render: Any, messages: Any, **options: Any) -> Tokens:
        try:
            return np.asarray(render(messages, **options), np.int32)
        except Exception as error:  # the package's errors have no common class
            raise RendererError(f"renderers: the messages cannot be rendered: {error}") from error


def _refuse_prefill(messages: Sequence[ChatMessage]) -> None:
    if messages and messages[-1].get("role") == "assistant":
        raise RendererError(
            "agent.renderer=library: the prompt ends with a message of the assistant, which this renderer cannot "
            "continue; use agent.renderer=chat_template"
        )


def _specs(tools: Sequence[ToolSchema]) -> list[Any] | None:
    return [dict(tool.get("function", tool)) for tool in tools] or None


def _text_specs(tools: Sequence[ToolSchema]) -> list[Any]:
    """Return the tools with a string for every argument."""
    return [
        {
            "name": name,
            "parameters": {"properties": {key: {"type": "string"} for key in schema.get("properties") or ()}},
        }
        for name, schema in tool_parameters(tools).items()
    ]


def _typed(call: Any, as_text: Any, schemas: Mapping[str, Mapping[str, Any]]) -> Any:
    """Return a call whose arguments have the types of the tool's schema.

    Where a family writes arguments without quotes, the package reads JSON unless an argument's type is exactly string,
    so an optional string ``1.10`` would become a number. In such a family the two readings differ.

    Args:
        call, as_text: the package's readings by the tools' schemas, and with every argument as a string.
        schemas: schema of each tool's arguments.
    """
    texts = as_text.arguments
    is_same = repr((call.status, call.arguments)) == repr((as_text.status, texts))
    if is_same or not isinstance(texts, dict):
        return call
    return replace(as_text, arguments=arguments_by_schema(texts, schemas.get(as_text.name or "", {})))


def _call(number: int, call: Any) -> ToolCall:
    arguments = call.arguments if isinstance(call.arguments, dict) else {}
    well_formed = call.status == "ok" and bool(call.name)
    error = "" if well_formed else f"The tool call is malformed ({call.status}): {call.raw}"
    return ToolCall(call.name or "", arguments, call.id or f"call_{number}", error)
