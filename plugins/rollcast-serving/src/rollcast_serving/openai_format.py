"""Answers of OpenAI's API: choices, log-probs, models, and streams of events."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from aiohttp import web
from numpy.typing import NDArray

from rollcast_serving.openai_errors import model_not_found
from rollcast_serving.openai_requests import ChatRequest, CompletionRequest
from rollcast_serving.stops import TextPieces

__all__ = [
    "SampledToken",
    "build_answer",
    "build_choice",
    "cut_stop_token",
    "cut_text",
    "log_probs_entry",
    "models_response",
    "send_answer",
]

Ids = TypeVar("Ids", NDArray[np.int32], list[int])


class SampledToken(NamedTuple):
    """A sampled token.

    Attributes:
        token_id: its id.
        name: its text on its own, for log-probs.
        log_prob: its log-prob.
    """

    token_id: int
    name: str
    log_prob: float


def cut_text(text: str, stops: Sequence[str]) -> str:
    """Return the text before the first stop string, which the API leaves out of its answers."""
    return text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]


def cut_stop_token(ids: Ids, finish_reason: str, stop_ids: Container[int]) -> Ids:
    """Return the ids without the stop token at their end, whose text is not part of an answer."""
    text_ids: Ids = ids[:-1] if finish_reason == "stop" and len(ids) and int(ids[-1]) in stop_ids else ids
    return text_ids


def log_probs_entry(
    decode: Callable[[Sequence[int]], str], tokens: Sequence[SampledToken], text: str, chat: bool
) -> dict[str, Any]:
    """Return a choice's ``logprobs``, with an entry for each sampled token.

    The ``bytes`` of the entries join to the text as UTF-8; a character of several tokens belongs to the last of them.
    Tokens that are not part of the text, such as the stop token, have none.

    Args:
        decode: returns the text of token ids, as in the choice.
        tokens: sampled tokens.
        text: text of the choice, with which the text of the tokens begins.
        chat: True for the format of chat completions.
    """
    start, offsets, shown = 0, [], []
    for piece in TextPieces.split(decode, [token.token_id for token in tokens]):
        offsets.append(start)
        shown.append(piece[: len(text) - start])
        start += len(shown[-1])
    if not chat:
        return {
            "tokens": [token.name for token in tokens],
            "token_logprobs": [token.log_prob for token in tokens],
            "top_logprobs": None,
            "text_offset": offsets,
        }
    entries = [
        {"token": token.name, "logprob": token.log_prob, "bytes": list(piece.encode()), "top_logprobs": []}
        for token, piece in zip(tokens, shown, strict=True)
    ]
    return {"content": entries, "refusal": None}


def build_choice(
    index: int, shown: str | Mapping[str, Any], finish_reason: str, logprobs: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return a choice.

    Args:
        index: place of the choice.
        shown: text of a completion, or message of a chat completion.
        finish_reason: that of the sampled sequence; a sequence that was cut off has ``length`` in the API.
        logprobs: log-probs of the choice; None if the request does not want any.
    """
    reason = "stop" if finish_reason == "stop" else "length"
    choice: dict[str, Any] = {"index": index, "finish_reason": reason, "logprobs": logprobs}
    if isinstance(shown, str):
        return choice | {"text": shown}
    if shown.get("tool_calls") and reason == "stop":
        choice["finish_reason"] = "tool_calls"
    return choice | {"message": {"refusal": None, **shown}}


def build_answer(
    model: str,
    request: ChatRequest | CompletionRequest,
    choices: Sequence[Mapping[str, Any]],
    prompt_tokens: int,
    completion_tokens: int,
) -> dict[str, Any]:
    """Return the answer to a request.

    Args:
        model: name of the model if the request does not have one.
        request: the request.
        choices: choices in their order.
        prompt_tokens, completion_tokens: numbers of tokens.
    """
    chat = isinstance(request, ChatRequest)
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": request.model or model,
        "choices": list(choices),
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
    }


def models_response(models: tuple[str, ...], name: str | None = None) -> web.Response:
    """Return the answer of ``/v1/models``, or of ``/v1/models/NAME``.

    Raises:
        ApiError: there is no model of this name.
    """
    entries = {model: {"id": model, "object": "model", "created": 0, "owned_by": "rollcast"} for model in models}
    if name is None:
        return web.json_response({"object": "list", "data": list(entries.values())})
    if name not in entries:
        raise model_not_found(name, models)
    return web.json_response(entries[name])


async def send_answer(
    request: web.Request, asked: ChatRequest | CompletionRequest, answer: Mapping[str, Any]
) -> web.StreamResponse:
    """Send an answer whole or, if requested, as a stream of events."""
    if not asked.stream:
        return web.json_response(answer)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    for event in _events(answer, asked.includes_usage):
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def _events(answer: Mapping[str, Any], with_usage: bool) -> Iterator[dict[str, Any]]:
    """Yield an answer as the events of a stream: each choice's content and end, then the usage."""
    head = {key: answer[key] for key in ("id", "created", "model")}
    chat = answer["object"] == "chat.completion"
    head["object"] = "chat.completion.chunk" if chat else "text_completion"
    if with_usage:
        head["usage"] = None
    for choice in answer["choices"]:
        if not chat:
            yield {**head, "choices": [choice]}
            continue
        rest = {key: value for key, value in choice.items() if key not in ("message", "finish_reason")}
        message = dict(choice["message"])
        calls = [{"index": i, **call} for i, call in enumerate(message.pop("tool_calls", ()))]
        delta = {**message, **({"tool_calls": calls} if calls else {})}
        yield {**head, "choices": [{**rest, "delta": delta, "finish_reason": None}]}
        end = {"index": choice["index"], "delta": {}, "finish_reason": choice["finish_reason"], "logprobs": None}
        yield {**head, "choices": [end]}
    if with_usage:
        yield {**head, "choices": [], "usage": answer["usage"]}
