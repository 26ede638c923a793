"""The format of OpenAI's API: parsing requests, building answers and errors, writing streams.

Shared by the replicas' endpoint and by gateways that record samples.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from aiohttp import web

from rollcast.contracts.rollout import SamplingParams
from rollcast.errors import RequestError

__all__ = [
    "build_answer",
    "error_response",
    "find_messages",
    "find_prompts",
    "log_probs_entry",
    "models_response",
    "read_body",
    "read_sampling",
    "send_answer",
]

_UNSUPPORTED = ("functions", "response_format", "best_of", "suffix", "echo", "audio", "modalities")


async def read_body(request: web.Request) -> dict[str, Any]:
    """Return the JSON object of a request.

    Raises:
        RequestError: the body is not a JSON object.
    """
    try:
        body = await request.json()
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestError("the body has to be a JSON object")
    return body


def find_messages(body: Mapping[str, Any]) -> list[Any]:
    """Return a chat request's messages.

    Raises:
        RequestError: there are none.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages has to be a list of messages")
    return messages


def find_prompts(body: Mapping[str, Any]) -> list[str | list[int]]:
    """Return the prompts of a completion request, as texts or token ids.

    Raises:
        RequestError: there is no prompt, or it has another type.
    """
    prompt = body.get("prompt")
    prompts: list[Any] = (
        prompt if isinstance(prompt, list) and not all(isinstance(each, int) for each in prompt) else [prompt]
    )
    if not all(isinstance(each, str) or _are_ids(each) for each in prompts):
        raise RequestError("prompt has to be a text, texts, token ids, or lists of token ids")
    return prompts


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, int) for each in value)


def read_sampling(
    body: Mapping[str, Any], default: SamplingParams, unsupported: Sequence[str] = ()
) -> tuple[SamplingParams, int]:
    """Return a request's sampling parameters, and its number of choices.

    Args:
        body: the request.
        default: parameters that the request does not set.
        unsupported: names that this endpoint refuses in addition to those that all endpoints refuse.

    Raises:
        RequestError: a parameter is not supported, or has a wrong type or value.
    """
    for name in (*_UNSUPPORTED, *unsupported):
        if body.get(name):
            raise RequestError(f"{name} is not supported by this endpoint")
    stop = body.get("stop") or ()
    limit = body.get("max_completion_tokens") or body.get("max_tokens") or default.max_tokens
    try:
        sampling = replace(
            default,
            temperature=float(_given(body, "temperature", default.temperature)),
            top_p=float(_given(body, "top_p", default.top_p)),
            top_k=int(_given(body, "top_k", default.top_k)),
            max_tokens=int(limit),
            stop_token_ids=tuple(int(each) for each in body.get("stop_token_ids") or default.stop_token_ids),
            stop=(stop,) if isinstance(stop, str) else tuple(str(each) for each in stop),
            ignore_eos=bool(_given(body, "ignore_eos", default.ignore_eos)),
            min_p=float(_given(body, "min_p", default.min_p)),
            repetition_penalty=float(_given(body, "repetition_penalty", default.repetition_penalty)),
            logit_bias=_logit_bias(body.get("logit_bias"), default),
        )
        count = int(_given(body, "n", 1))
    except (TypeError, ValueError, AttributeError) as error:
        raise RequestError(f"a sampling parameter has a wrong type: {error}") from error
    if sampling.max_tokens < 1 or count < 1:
        raise RequestError("max_tokens and n have to be at least 1")
    return sampling, count


def _given(body: Mapping[str, Any], name: str, default: float) -> Any:
    value = body.get(name)
    return default if value is None else value


def _logit_bias(given: Any, default: SamplingParams) -> tuple[tuple[int, float], ...]:
    """Return the API's map of token ids, which are strings in JSON, as pairs."""
    if given is None:
        return default.logit_bias
    return tuple(sorted((int(token), float(bias)) for token, bias in given.items()))


def log_probs_entry(tokens: Sequence[str], values: Sequence[float], chat: bool) -> dict[str, Any]:
    """Return a choice's ``logprobs``."""
    if not chat:
        return {"tokens": list(tokens), "token_logprobs": list(values), "top_logprobs": None, "text_offset": []}
    content = [
        {"token": token, "logprob": value, "bytes": list(token.encode(errors="replace")), "top_logprobs": []}
        for token, value in zip(tokens, values, strict=True)
    ]
    return {"content": content, "refusal": None}


def build_answer(
    model: str, choices: Sequence[Mapping[str, Any]], chat: bool, prompt_tokens: int, completion_tokens: int
) -> dict[str, Any]:
    """Return the answer to a request."""
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": list(choices),
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
    }


def models_response(model: str) -> web.Response:
    """Return the answer of ``/v1/models``."""
    entry = {"id": model, "object": "model", "created": 0, "owned_by": "rollcast"}
    return web.json_response({"object": "list", "data": [entry]})


def error_response(status: int, message: str, kind: str, code: str | None = None) -> web.Response:
    """Return an error in the format of OpenAI's API."""
    return web.json_response({"error": {"message": message, "type": kind, "code": code, "param": None}}, status=status)


async def send_answer(
    request: web.Request, body: Mapping[str, Any], answer: Mapping[str, Any], chat: bool
) -> web.StreamResponse:
    """Send an answer whole or, if requested, as a stream of events."""
    if not body.get("stream"):
        return web.json_response(answer)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    usage = bool((body.get("stream_options") or {}).get("include_usage"))
    for event in _events(answer, chat, usage):
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def _events(answer: Mapping[str, Any], chat: bool, usage: bool) -> Iterator[dict[str, Any]]:
    """Yield an answer as the events of a stream: each choice's content and end, then the usage."""
    head = {key: answer[key] for key in ("id", "created", "model")}
    head["object"] = "chat.completion.chunk" if chat else "text_completion"
    for choice in answer["choices"]:
        rest = {key: found for key, found in choice.items() if key not in ("message", "text", "finish_reason")}
        if not chat:
            yield {**head, "choices": [{**rest, "text": choice["text"], "finish_reason": choice["finish_reason"]}]}
            continue
        message = dict(choice["message"])
        calls = [{"index": i, **call} for i, call in enumerate(message.pop("tool_calls", ()))]
        delta = {**message, **({"tool_calls": calls} if calls else {})}
        yield {**head, "choices": [{**rest, "delta": delta, "finish_reason": None}]}
        yield {**head, "choices": [{"index": choice["index"], "delta": {}, "finish_reason": choice["finish_reason"]}]}
    if usage:
        yield {**head, "choices": [], "usage": answer["usage"]}
