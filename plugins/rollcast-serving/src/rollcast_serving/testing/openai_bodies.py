"""Bodies for servers of OpenAI's API, from a seed: malformed ones, and valid ones with a random change."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["changed_bodies", "malformed_bodies"]

_NOT_TEXT: tuple[Any, ...] = (5, 1.5, True, [], {}, [None])
_NOT_NUMBER: tuple[Any, ...] = ("1", "", True, [], {}, [1])
_NOT_FLAG: tuple[Any, ...] = ("true", 1, 0.0, [], {})
_NOT_LIST: tuple[Any, ...] = (5, "a", True, {}, {"a": 1})
_NOT_OBJECT: tuple[Any, ...] = (5, "a", True, [], [1])
_JUNK: tuple[Any, ...] = (5, "a", True, [1], ["a"], [[]], {"a": 1}, [None], 1.5, -1)

#: Values that a parameter of chat completions cannot have.
_WRONG: Mapping[str, tuple[Any, ...]] = {
    "messages": (*_NOT_LIST, [], [5], ["a"], [[]], [{}], [None], None),
    "model": _NOT_TEXT,
    "temperature": (*_NOT_NUMBER, -0.1, -1, 2.01, 10**400, -(10**40)),
    "top_p": (*_NOT_NUMBER, -0.1, 7, 1.0001),
    "max_tokens": (*_NOT_NUMBER, 0, -1, 1.5, 2**31, 10**30),
    "max_completion_tokens": (*_NOT_NUMBER, 0, -1, 1.5, 2**31),
    "n": (*_NOT_NUMBER, 0, -1, 1.5, 129, 10**30),
    "seed": (*_NOT_NUMBER, 1.5, 2**63, -(2**63) - 1),
    "stop": (5, True, {}, [5], [None], ["a", 5], ["a"] * 5, [""], ""),
    "logit_bias": (*_NOT_OBJECT, {"a": 1}, {"5": "x"}, {"5": 101}, {"-1": 1}, {str(2**31): 1}, {"5": None}),
    "logprobs": _NOT_FLAG,
    "top_logprobs": (*_NOT_NUMBER, -1, 21),
    "stream": _NOT_FLAG,
    "stream_options": (*_NOT_OBJECT, {}, {"include_usage": True}, {"include_usage": 5}, {"no_such": True}),
    "frequency_penalty": (*_NOT_NUMBER, 2.1, -3),
    "presence_penalty": (*_NOT_NUMBER, 2.1, -3),
    "metadata": (*_NOT_OBJECT, {"a": 5}, {"a" * 65: "b"}, {"a": "b" * 513}, {str(i): "a" for i in range(17)}),
    "user": _NOT_TEXT,
    "response_format": (*_NOT_OBJECT, {"type": "xml"}, {"type": 5}, {}),
    "modalities": (*_NOT_LIST, ["audio"], [5], []),
    "tools": (*_NOT_LIST, [5], ["x"], [{}], [{"type": "function"}], [{"type": "function", "function": 5}]),
    "tool_choice": (5, True, [], "no-such", {}, {"type": 5}, {"type": "function"}, {"type": "allowed_tools"}),
    "parallel_tool_calls": ("true", 1, [], {}),
    "stop_token_ids": (*_NOT_LIST, [2**31], [-1], ["a"], [1.5], [True], [None]),
    "top_k": (*_NOT_NUMBER, -2, 1.5),
    "no_such_parameter": (1, "a", None),
}
_CONTENTS: tuple[Any, ...] = (5, True, 1.5, {}, [], [5], ["a"], [None], [{}], [{"type": 5}], [{"type": "text"}])
_PARTS: tuple[Any, ...] = ([{"type": "text", "text": 5}], [{"type": "image_url", "image_url": {"url": "data:"}}])
_CALL = {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": "{}"}}
_CALLS: tuple[Any, ...] = (
    *_NOT_LIST,
    *([junk] for junk in _JUNK),
    [{}],
    [{**_CALL, "id": 5}],
    [{**_CALL, "id": None}],
    [{**_CALL, "type": "custom"}],
    [{**_CALL, "function": None}],
    [{**_CALL, "function": "add"}],
    [{**_CALL, "function": {"name": "add"}}],
    [{**_CALL, "function": {"name": 5, "arguments": "{}"}}],
    [{**_CALL, "function": {"name": "add", "arguments": {"a": 1}}}],
    [_CALL, 5],
)
#: Messages that a conversation cannot have.
_MESSAGES: tuple[Any, ...] = (
    *(junk for junk in _JUNK if not isinstance(junk, dict)),
    {"role": "king", "content": "a"},
    {"role": 5, "content": "a"},
    {"content": "a"},
    {"role": "user"},
    {"role": "user", "content": None},
    {"role": "user", "content": "a", "name": 5},
    {"role": "tool", "content": "a"},
    {"role": "tool", "content": "a", "tool_call_id": 5},
    {"role": "user", "content": "a", "tool_calls": [_CALL]},
    *({"role": "user", "content": content} for content in (*_CONTENTS, *_PARTS)),
    *({"role": "assistant", "content": "a", "tool_calls": calls} for calls in _CALLS),
)
#: JSON that a valid body cannot end with.
_TAILS: tuple[bytes, ...] = (
    *(b', "temperature": ' + number for number in (b"NaN", b"Infinity", b"-Infinity", b"1e999")),
    *(b', "user": "' + text + b'"' for text in (b"\\ud800", b"\\udc00", b"\\ud800\\ud800", b"\\x")),
    *(b', "user": "' + text + b'"' for text in (b"\xff", b"\xc3", b"\xed\xa0\x80", b"\x00")),
    *(b', "metadata": ' + b"[" * depth for depth in (101, 5000, 200_000)),
    b', "metadata": ' + b'{"a":' * 5000 + b"1" + b"}" * 5000,
    b', "n": 1, "n": 1',
    b', "seed": ' + b"9" * 5000,
)
_NO_OBJECTS = (b"", b"null", b"[]", b"5", b'"a"', b"{", b"\x00", b"data: {}", b"a=b")


def _mangled(chance: random.Random, body: bytes) -> bytes:
    """Return a valid body as something that is not a JSON object."""
    return chance.choice(
        [
            *(body[:-1] + tail + b"}" for tail in _TAILS),
            *_NO_OBJECTS,
            body[: chance.randrange(len(body))],
            body + b"}",
            b"\xef\xbb\xbf" + body,
            body.decode().encode("utf-16"),
            body.replace(b'"', b"'"),
        ]
    )


def _valid(chance: random.Random, model: str) -> dict[str, Any]:
    """Return a valid body."""
    further: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "max_tokens": 5,
        "stop": ["x"],
        "user": "u",
        "metadata": {"a": "b"},
        "logprobs": True,
        "response_format": {"type": "text"},
    }
    chosen = chance.sample(sorted(further), chance.randrange(len(further)))
    body = {"model": model, "messages": [{"role": "user", "content": "hé"}]}
    return body | {name: further[name] for name in chosen}


def malformed_bodies(seed: int, count: int, model: str) -> Iterator[bytes]:
    """Yield bodies of chat completions, each of which a server has to refuse.

    Args:
        seed: seed of the bodies.
        count: number of bodies.
        model: name of the served model.
    """
    chance = random.Random(seed)  # noqa: S311  # no secret
    for number in range(count):
        body = _valid(chance, model)
        if number % 3 == 0:
            yield _mangled(chance, json.dumps(body).encode())
            continue
        if number % 3 == 1:
            name = chance.choice(sorted(_WRONG))
            body[name] = chance.choice(_WRONG[name])
        else:
            body["messages"].insert(chance.randrange(2), chance.choice(_MESSAGES))
        yield json.dumps(body).encode()


def changed_bodies(seed: int, count: int, model: str) -> Iterator[bytes]:
    """Yield bodies of chat completions in which one value is replaced; a server refuses or answers them.

    Args:
        seed: seed of the bodies.
        count: number of bodies.
        model: name of the served model.
    """
    chance = random.Random(seed)  # noqa: S311  # no secret
    for _ in range(count):
        body: dict[str, Any] = _valid(chance, model)
        body["messages"] += [
            {"role": "assistant", "content": "a", "tool_calls": [copy.deepcopy(_CALL)]},
            {"role": "tool", "content": [{"type": "text", "text": "4"}], "tool_call_id": "call_0"},
        ]
        place: Any = body
        while True:
            key = chance.choice(sorted(place) if isinstance(place, dict) else range(len(place)))
            if not isinstance(place[key], (dict, list)) or not place[key] or chance.random() < 0.3:
                break
            place = place[key]
        place[key] = chance.choice((*_JUNK, None, "", 0, 10**30, "{", "\u2028", "<|im_end|>"))
        yield json.dumps(body).encode()
