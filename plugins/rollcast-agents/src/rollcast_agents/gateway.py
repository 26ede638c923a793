"""One OpenAI-compatible endpoint for all programs of a run; each session has its own secret.

A secret opens only its session. Requests sample through the session, so every token that a program's model writes is
recorded as the engine returned it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from aiohttp import web

from rollcast.contracts.renderer import BaseRenderer, ChatMessage
from rollcast.contracts.rollout import SamplingParams
from rollcast.contracts.session import Reply, Session
from rollcast.errors import RendererError, RequestError, RolloutError, SessionEnded
from rollcast_agents.chat import as_chat
from rollcast_serving.openai_format import (
    build_answer,
    error_response,
    find_messages,
    find_prompts,
    log_probs_entry,
    models_response,
    read_body,
    read_sampling,
    send_answer,
)

__all__ = ["Access", "Gateway"]

logger = logging.getLogger(__name__)

#: Maximum size of a request's body in bytes.
_MAX_BODY = 64 * 2**20
#: Header in which OpenAI's clients count their retries.
_RETRY = "x-stainless-retry-count"


@dataclass(frozen=True)
class Access:
    """Connection data with which a program reaches its session.

    Attributes:
        base_url: URL of the endpoint, such as ``http://127.0.0.1:4711/v1``.
        api_key: secret of the session.
        conversation: returns the session's last chat request with its reply; empty before the first one.
    """

    base_url: str
    api_key: str
    conversation: Callable[[], Sequence[ChatMessage]]


@dataclass(eq=False)
class _Answer:
    """A request that is being answered, kept for retries.

    Attributes:
        task: samples the answer; continues if the client disconnects.
        delivered: True once a client has read the answer.
    """

    task: asyncio.Task[dict[str, Any]]
    delivered: bool = False


@dataclass(eq=False)
class _Client:
    """A session and the state of its secret."""

    session: Session
    sampling: SamplingParams
    answers: dict[str, _Answer] = field(default_factory=dict)
    conversation: Sequence[ChatMessage] = ()


class Gateway:
    """An HTTP server for sessions, on the event loop that started it.

    Args:
        renderer: renderer of the model; encodes completion prompts and decodes ids.
        model: name that ``/v1/models`` returns.
        sampling: parameters that a request does not set.
    """

    def __init__(self, renderer: BaseRenderer, model: str, sampling: SamplingParams) -> None:
        self._renderer, self._model, self._sampling = renderer, model, sampling
        self._clients: dict[str, _Client] = {}
        self._runner: web.AppRunner | None = None
        self._url = ""

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Listen, and return the base URL.

        Args:
            host: address to bind.
            port: port to bind; 0 for any free one.
        """
        app = web.Application(client_max_size=_MAX_BODY, middlewares=[self._guard])
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._completions)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=False)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        await site.start()
        bound = self._runner.addresses[0]
        self._url = f"http://{bound[0]}:{bound[1]}/v1"
        return self._url

    async def close(self) -> None:
        """Stop listening; requests in flight are interrupted."""
        if self._runner is not None:
            await self._runner.cleanup()

    @contextlib.contextmanager
    def open(self, session: Session, sampling: SamplingParams | None = None) -> Iterator[Access]:
        """Yield a secret for a session; it becomes invalid at the end of the block.

        Args:
            session: session that answers the requests.
            sampling: parameters that a request does not set; None for the gateway's.
        """
        secret = secrets.token_urlsafe(32)
        client = self._clients[secret] = _Client(session, sampling or self._sampling)
        try:
            yield Access(self._url, secret, lambda: client.conversation)
        finally:
            del self._clients[secret]
            for answer in client.answers.values():
                answer.task.cancel()

    # ---- requests ----

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if self._client_of(request) is None:
            return error_response(401, "this key opens no session", "invalid_api_key")
        try:
            return await handler(request)
        except (RequestError, RendererError, UnicodeError, RecursionError) as error:
            return error_response(400, str(error) or type(error).__name__, "invalid_request_error")
        except SessionEnded as ended:
            code = "context_length_exceeded" if ended.end == "length" else f"session_{ended.end}"
            return error_response(400, str(ended), "invalid_request_error", code)
        except RolloutError as error:
            return error_response(503, str(error), "engine_error")

    def _client_of(self, request: web.Request) -> _Client | None:
        scheme, _, secret = request.headers.get("Authorization", "").partition(" ")
        return self._clients.get(secret.strip()) if scheme.lower() == "bearer" else None

    async def _models(self, request: web.Request) -> web.Response:
        return models_response(self._model)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._respond(request, chat=True)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._respond(request, chat=False)

    async def _respond(self, request: web.Request, chat: bool) -> web.StreamResponse:
        body = await read_body(request)
        client = self._client_of(request)
        if client is None:
            raise RequestError("the session was closed")
        answer = self._answer(client, body, chat, _is_retry(request))
        # The client may disconnect and retry; the sampled answer waits for it.
        value = await asyncio.shield(answer.task)
        response = await send_answer(request, body, value, chat)
        answer.delivered = request.transport is not None and not request.transport.is_closing()
        return response

    def _answer(self, client: _Client, body: Mapping[str, Any], chat: bool, retry: bool) -> _Answer:
        key = hashlib.sha256(json.dumps([chat, body], sort_keys=True).encode()).hexdigest()
        known = client.answers.get(key)
        if known is not None and (retry or not known.delivered) and not _broken(known.task):
            return known
        sample = self._sample_chat if chat else self._sample_text
        answer = client.answers[key] = _Answer(asyncio.ensure_future(sample(client, body)))
        return answer

    async def _sample_chat(self, client: _Client, body: Mapping[str, Any]) -> dict[str, Any]:
        messages, tools = find_messages(body), body.get("tools") or []
        if not isinstance(tools, list) or not all(isinstance(tool, Mapping) and "function" in tool for tool in tools):
            raise RequestError('tools must be a list of {"type": "function", "function": {...}}')
        replies = await self._replies(client, messages, tools, body)
        client.conversation = [*messages, as_chat(replies[0].message)]
        return self._build(replies, body, chat=True)

    async def _sample_text(self, client: _Client, body: Mapping[str, Any]) -> dict[str, Any]:
        prompt, *others = find_prompts(body)
        if others:
            raise RequestError("prompt must be one text or one list of token ids")
        ids = self._renderer.encode(prompt) if isinstance(prompt, str) else np.asarray(prompt, np.int32)
        replies = await self._replies(client, ids, (), body)
        return self._build(replies, body, chat=False)

    def _build(self, replies: Sequence[Reply], body: Mapping[str, Any], chat: bool) -> dict[str, Any]:
        choices = [self._choice(index, reply, body, chat) for index, reply in enumerate(replies)]
        given = sum(len(reply.token_ids) for reply in replies)
        model = str(body.get("model") or self._model)
        return build_answer(model, choices, chat, len(replies[0].prompt_ids), given)

    async def _replies(
        self, client: _Client, prompt: Any, tools: Sequence[Any], body: Mapping[str, Any]
    ) -> list[Reply]:
        sampling, count = read_sampling(body, client.sampling)
        return list(await asyncio.gather(*(client.session.sample(prompt, tools, sampling) for _ in range(count))))

    def _choice(self, index: int, reply: Reply, body: Mapping[str, Any], chat: bool) -> dict[str, Any]:
        reason = "length" if reply.finish_reason == "length" else "stop"
        choice: dict[str, Any] = {"index": index, "logprobs": None}
        if chat:
            message = _as_openai(as_chat(reply.message))
            reason = "tool_calls" if "tool_calls" in message and reason == "stop" else reason
            choice["message"] = message
        else:
            choice["text"] = reply.message.text
        choice["finish_reason"] = reason
        if body.get("logprobs") not in (None, False):
            choice["logprobs"] = self._log_probs(reply, chat)
        if body.get("return_token_ids"):
            choice |= {"prompt_token_ids": reply.prompt_ids.tolist(), "token_ids": reply.token_ids.tolist()}
        return choice

    def _log_probs(self, reply: Reply, chat: bool) -> dict[str, Any]:
        tokens = [self._renderer.decode(reply.token_ids[i : i + 1]) for i in range(len(reply.token_ids))]
        return log_probs_entry(tokens, reply.log_probs.tolist(), chat)


def _is_retry(request: web.Request) -> bool:
    return request.headers.get(_RETRY, "0") not in ("", "0")


def _broken(task: asyncio.Task[Any]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


def _as_openai(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with the arguments of its calls as JSON text, as OpenAI's clients expect."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    return {
        **message,
        "refusal": None,
        **({"tool_calls": calls, "content": message["content"] or None} if calls else {}),
    }
