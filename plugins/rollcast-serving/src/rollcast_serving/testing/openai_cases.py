"""Requests of OpenAI's API that a server accepts, and that it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = [
    "ACCEPTED",
    "ADD",
    "BAD_MESSAGES",
    "CALL",
    "MALFORMED",
    "REFUSED",
    "REFUSED_COMPLETIONS",
    "SUB",
    "TEXT",
    "USER",
]

USER = {"role": "user", "content": "hello"}
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ADD = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": PARAMETERS}}
SUB = {"type": "function", "function": {"name": "sub", "parameters": PARAMETERS}}
CALL = {"id": "call_x", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TEXT = "né€ 😀!"

#: Values that a chat completion accepts, since they change nothing or are honoured elsewhere.
ACCEPTED: Mapping[str, Mapping[str, Any]] = {
    "frequency_penalty=0": {"frequency_penalty": 0},
    "logit_bias={}": {"logit_bias": {}},
    "logprobs=false": {"logprobs": False},
    "max_completion_tokens": {"max_completion_tokens": 50},
    "max_tokens": {"max_tokens": 50},
    "metadata": {"metadata": {"run": "a"}},
    "modalities=text": {"modalities": ["text"]},
    "n=1": {"n": 1},
    "nothing": {},
    "null": {"extra_body": dict.fromkeys(("stop", "temperature", "seed", "logit_bias", "tools", "stream_options"))},
    "presence_penalty=0": {"presence_penalty": 0.0},
    "prompt_cache_key": {"prompt_cache_key": "k"},
    "response_format=text": {"response_format": {"type": "text"}},
    "safety_identifier": {"safety_identifier": "s"},
    "service_tier=auto": {"service_tier": "auto"},
    "service_tier=default": {"service_tier": "default"},
    "stop=[]": {"stop": []},
    "store=false": {"store": False},
    "stream=false": {"stream": False},
    "temperature=0": {"temperature": 0},
    "temperature=2": {"temperature": 2},
    "tool_choice=none": {"tool_choice": "none"},
    "top_logprobs=0": {"logprobs": True, "top_logprobs": 0},
    "top_p=1": {"top_p": 1},
    "user": {"user": "u"},
    "verbosity=medium": {"verbosity": "medium"},
}
#: Values that a chat completion refuses, with the parameter that the error names.
REFUSED: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "audio": ({"audio": {"voice": "alloy", "format": "wav"}}, "audio"),
    "frequency_penalty=1": ({"frequency_penalty": 1.0}, "frequency_penalty"),
    "frequency_penalty=3": ({"frequency_penalty": 3}, "frequency_penalty"),
    "function_call": ({"function_call": "auto"}, "function_call"),
    "functions": ({"functions": [{"name": "add"}]}, "functions"),
    "logit_bias of text": ({"logit_bias": {"a": 1}}, "logit_bias"),
    "logit_bias too large": ({"logit_bias": {"5": 101}}, "logit_bias"),
    "max_completion_tokens=0": ({"max_completion_tokens": 0}, "max_completion_tokens"),
    "max_tokens and max_completion_tokens": ({"max_tokens": 5, "max_completion_tokens": 5}, "max_tokens"),
    "max_tokens=-1": ({"max_tokens": -1}, "max_tokens"),
    "max_tokens=0": ({"max_tokens": 0}, "max_tokens"),
    "metadata of numbers": ({"metadata": {"a": 1}}, "metadata"),
    "modalities=audio": ({"modalities": ["text", "audio"]}, "modalities"),
    "moderation": ({"moderation": {"model": "m"}}, "moderation"),
    "n=0": ({"n": 0}, "n"),
    "n=129": ({"n": 129}, "n"),
    "prediction": ({"prediction": {"type": "content", "content": "a"}}, "prediction"),
    "presence_penalty=-1": ({"presence_penalty": -1.0}, "presence_penalty"),
    "reasoning_effort": ({"reasoning_effort": "low"}, "reasoning_effort"),
    "response_format=json_object": ({"response_format": {"type": "json_object"}}, "response_format"),
    "response_format=json_schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}},
        "response_format",
    ),
    "service_tier=flex": ({"service_tier": "flex"}, "service_tier"),
    "stop of five": ({"stop": list("abcde")}, "stop"),
    "stop of nothing": ({"stop": ""}, "stop"),
    "stop of numbers": ({"stop": [1]}, "stop"),
    "store=true": ({"store": True}, "store"),
    "stream_options without stream": ({"stream_options": {"include_usage": True}}, "stream_options"),
    "temperature=-1": ({"temperature": -1}, "temperature"),
    "temperature=2.1": ({"temperature": 2.1}, "temperature"),
    "temperature=hot": ({"temperature": "hot"}, "temperature"),
    "tool_choice=function": (
        {"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "add"}}},
        "tool_choice",
    ),
    "tool_choice=required": ({"tools": [ADD], "tool_choice": "required"}, "tool_choice"),
    "tool_choice of another tool": (
        {
            "tools": [ADD],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "no"}}]},
            },
        },
        "tool_choice",
    ),
    "tools of custom type": ({"tools": [{"type": "custom", "custom": {"name": "c"}}]}, "tools"),
    "tools with a bad name": ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
    "parallel_tool_calls=false": ({"tools": [ADD], "parallel_tool_calls": False}, "parallel_tool_calls"),
    "top_logprobs=5": ({"logprobs": True, "top_logprobs": 5}, "top_logprobs"),
    "top_logprobs=21": ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    "top_p=-0.1": ({"top_p": -0.1}, "top_p"),
    "top_p=7": ({"top_p": 7}, "top_p"),
    "unknown parameter": ({"extra_body": {"no_such": 1}}, "no_such"),
    "verbosity=low": ({"verbosity": "low"}, "verbosity"),
    "web_search_options": ({"web_search_options": {}}, "web_search_options"),
}
#: Messages that are refused.
BAD_MESSAGES: Mapping[str, Any] = {
    "none": [],
    "unknown role": [{"role": "king", "content": "a"}],
    "without content": [{"role": "user"}],
    "content is a number": [{"role": "user", "content": 5}],
    "an image": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}],
    "audio": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]}],
    "a tool's result without its call": [USER, {"role": "tool", "content": "4"}],
    "arguments are an object": [
        USER,
        {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "add", "arguments": {"a": 1}}}]},
    ],
}
#: Parameters of completions that are refused, with the parameter that the error names.
REFUSED_COMPLETIONS: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "best_of": ({"best_of": 2}, "best_of"),
    "echo": ({"echo": True}, "echo"),
    "logprobs=5": ({"logprobs": 5}, "logprobs"),
    "max_tokens=0": ({"max_tokens": 0}, "max_tokens"),
    "prompt is an object": ({"prompt": {"a": 1}}, "prompt"),
    "prompt id above int32": ({"prompt": [2**31]}, "prompt"),
    "prompt id below 0": ({"prompt": [-1]}, "prompt"),
    "prompt of nothing": ({"prompt": []}, "prompt"),
    "prompt of mixed types": ({"prompt": [1, "a"]}, "prompt"),
    "suffix": ({"suffix": "end"}, "suffix"),
    "tools": ({"extra_body": {"tools": [ADD]}}, "tools"),
}
#: Bodies that are not JSON objects.
MALFORMED: Mapping[str, bytes] = {
    "empty": b"",
    "not JSON": b"hello",
    "an array": b"[]",
    "cut": b'{"model": "policy", "messages": [',
    "a key twice": b'{"model": "policy", "model": "policy", "messages": [{"role": "user", "content": "a"}]}',
    "NaN": b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}',
    "Infinity": b'{"messages": [{"role": "user", "content": "a"}], "temperature": Infinity}',
    "1e999": b'{"messages": [{"role": "user", "content": "a"}], "temperature": 1e999}',
    "lone surrogate": b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    "not UTF-8": b'{"messages": [{"role": "user", "content": "\xff"}]}',
    "UTF-16": '{"messages": [{"role": "user", "content": "a"}]}'.encode("utf-16"),
    "deep": b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "a huge number": b'{"messages": [{"role": "user", "content": "a"}], "seed": ' + b"9" * 5000 + b"}",
}
