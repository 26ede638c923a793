"""The renderer ``my_plugin``: a conversation as lines of plain text, for base models without a template."""

import json
from collections.abc import Sequence

import numpy as np

from rollcast_agents.contracts.renderer import BaseRenderer, Message, RendererSetup
from rollcast_agents.contracts.trajectory import Tokens
from rollcast_data.chat_template import ChatMessage, ToolCall, ToolSchema
from rollcast_data.tokenizer import read_tokenizer

CALL = "CALL "


class MyPlugin(BaseRenderer):
    """Renders each message as ``Role: text``; a line ``CALL {"name": ..., "arguments": {...}}`` calls a tool."""

    def __init__(self, setup: RendererSetup) -> None:
        super().__init__(setup)
        self.tokenizer = read_tokenizer(setup.model_path, setup.trust_remote_code)

    def start(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema] = ()) -> Tokens:
        """Return the ids of a conversation, up to where the model's reply begins."""
        offered = "".join(f"Tool: {json.dumps(tool['function'])}\n" for tool in tools)
        return self.encode(offered + write_lines(messages) + "Assistant: ")

    def extend(self, ids: Tokens, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema] = ()) -> Tokens | None:
        """Return ``ids`` and the messages after the last reply; None if there is no reply."""
        last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
        if last < 0:
            return None
        # Only new messages are rendered, so no id that is there can change.
        return np.concatenate([ids, self.encode("\n" + write_lines(messages[last + 1 :]) + "Assistant: ")])

    def parse(self, ids: Tokens, tools: Sequence[ToolSchema] = ()) -> Message:
        """Return the reply behind sampled ids; a malformed call has an error, which the model reads."""
        context = ids[:-1] if len(ids) and int(ids[-1]) in self.stop_token_ids else ids
        lines = self.decode(context).split("\n")
        calls = [read_call(line, number) for number, line in enumerate(lines) if line.startswith(CALL)]
        return Message("\n".join(line for line in lines if not line.startswith(CALL)), tool_calls=tuple(calls))

    def encode(self, text: str) -> Tokens:
        """Return the ids of plain text."""
        return np.asarray(self.tokenizer.encode(text, add_special_tokens=False), np.int32)

    def decode(self, ids: Tokens) -> str:
        """Return the text of ids."""
        return str(self.tokenizer.decode(ids.tolist(), clean_up_tokenization_spaces=False))

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a reply."""
        return (int(self.tokenizer.eos_token_id),)


def write_lines(messages: Sequence[ChatMessage]) -> str:
    """Return messages as lines."""
    lines = []
    for message in messages:
        lines.append(f"{message['role'].capitalize()}: {message.get('content') or ''}\n")
        lines += [f"{CALL}{json.dumps(call['function'])}\n" for call in message.get("tool_calls") or ()]
    return "".join(lines)


def read_call(line: str, number: int) -> ToolCall:
    """Return the tool call of a line."""
    try:
        call = json.loads(line.removeprefix(CALL))
        return ToolCall(str(call["name"]), dict(call["arguments"]), f"call_{number}")
    except (ValueError, KeyError, TypeError) as error:
        return ToolCall("", error=f"{CALL.strip()} needs a JSON object with name and arguments: {error}")
