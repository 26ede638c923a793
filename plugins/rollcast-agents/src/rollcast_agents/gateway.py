"""One OpenAI-compatible endpoint for all programs of a run; each session has its own secret.

A secret opens only its session. Requests sample through the session, so every token that a program's model writes is
recorded as the engine returned it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web

from rollcast.contracts.rollout import SamplingParams
from rollcast.errors import RequestError
from rollcast_agents.chat import as_chat
from rollcast_agents.contracts.renderer import BaseRenderer
from rollcast_agents.contracts.session import Reply, Session
from rollcast_agents.contracts.trajectory import Tokens
from rollcast_agents.retries import Answers, is_gone
from rollcast_agents.shown import Shown, decode, read_reply
from rollcast_data.chat_template import ChatMessage
from rollcast_serving.openai_bodies import MAX_BODY, read_object
from rollcast_serving.openai_errors import ApiError, answer_errors, error_response
from rollcast_serving.openai_format import (
    SampledToken,
    build_answer,
    build_choice,
    log_probs_entry,
    models_response,
    send_answer,
)
from rollcast_serving.openai_requests import ChatRequest, CompletionRequest, Endpoint, read_chat, read_completion
from rollcast_serving.openai_tools import read_tools

__all__ = ["Access", "Gateway"]

_SEEDS = "the run seeds each rollout, and a fixed seed would make the rollouts of a group equal; remove it"


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
class _Client:
    """A session and the state of its secret."""

    session: Session
    sampling: SamplingParams
    answers: Answers = field(default_factory=Answers)
    conversation: Sequence[ChatMessage] = ()


class Gateway:
    """An HTTP server for sessions, on the event loop that started it.

    Args:
        renderer: renderer of the model; encodes completion prompts and decodes ids.
        model: name or folder of the model; requests may also name it ``policy``.
        sampling: parameters that a request does not set.
    """

    def __init__(self, renderer: BaseRenderer, model: str, sampling: SamplingParams) -> None:
        self._renderer, self._sampling = renderer, sampling
        models = tuple(dict.fromkeys(("policy", Path(model).name or "policy")))
        self._endpoint = Endpoint(models, tools=True, seeds=_SEEDS, several_prompts=False)
        self._clients: dict[str, _Client] = {}
        self._runner: web.AppRunner | None = None
        self._url = ""

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Listen, and return the base URL.

        Args:
            host: address to bind.
            port: port to bind; 0 for any free one.
        """
        app = web.Application(client_max_size=MAX_BODY, middlewares=[self._guard])
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name:.+}", self._models)
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
            client.answers.cancel()

    # ---- requests ----

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if self._client_of(request) is None:
            return error_response(401, "this key opens no session", "invalid_request_error", "invalid_api_key")
        return await answer_errors(request, handler)

    def _client_of(self, request: web.Request) -> _Client | None:
        scheme, _, secret = request.headers.get("Authorization", "").partition(" ")
        return self._clients.get(secret.strip()) if scheme.lower() == "bearer" else None

    async def _models(self, request: web.Request) -> web.Response:
        return models_response(self._endpoint.models, request.match_info.get("name"))

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await read_object(request)
        asked = read_chat(body, self._endpoint)
        return await self._respond(request, body, asked, partial(self._sample_chat, asked, body))

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await read_object(request)
        asked = read_completion(body, self._endpoint)
        return await self._respond(request, body, asked, partial(self._sample_text, asked))

    async def _respond(
        self,
        request: web.Request,
        body: Mapping[str, Any],
        asked: ChatRequest | CompletionRequest,
        sample: Callable[[_Client], Awaitable[dict[str, Any]]],
    ) -> web.StreamResponse:
        client = self._client_of(request)
        if client is None:
            raise RequestError("the session was closed")
        answer = client.answers.find_or_start(request, body, lambda: sample(client))
        # The client may disconnect and retry; the sampled answer waits for it.
        response = await send_answer(request, asked, await asyncio.shield(answer.task))
        if answer.request is request:
            answer.delivered = not is_gone(request)
        return response

    # ---- samples ----

    async def _sample_chat(self, asked: ChatRequest, body: Mapping[str, Any], client: _Client) -> dict[str, Any]:
        messages, tools = body["messages"], read_tools(asked.tool_choice, body.get("tools") or [])
        sampling = asked.sampling(client.sampling)
        replies = await self._replies(client, messages, tools.shown, sampling, asked.count)
        choices, seen = [], []
        for index, reply in enumerate(replies):
            shown = self._shown(reply, sampling)
            seen.append(as_chat(shown.message(tools.allow)))
            choices.append(self._choice(index, reply, shown, _as_openai(seen[-1]), asked))
        client.conversation = [*messages, seen[0]]
        return self._build(asked, choices, replies)

    async def _sample_text(self, asked: CompletionRequest, client: _Client) -> dict[str, Any]:
        (prompt,) = asked.prompt
        ids = self._renderer.encode(prompt) if isinstance(prompt, str) else np.asarray(prompt, np.int32)
        if not len(ids):
            raise ApiError("prompt is empty", "prompt")
        sampling = asked.sampling(client.sampling)
        replies = await self._replies(client, ids, (), sampling, asked.count)
        shown = [self._shown(reply, sampling) for reply in replies]
        choices = [
            self._choice(index, reply, message, message.text, asked)
            for index, (reply, message) in enumerate(zip(replies, shown, strict=True))
        ]
        return self._build(asked, choices, replies)

    async def _replies(
        self,
        client: _Client,
        prompt: Sequence[ChatMessage] | Tokens,
        tools: Sequence[Any],
        sampling: SamplingParams,
        count: int,
    ) -> list[Reply]:
        return list(await asyncio.gather(*(client.session.sample(prompt, tools, sampling) for _ in range(count))))

    def _build(
        self, asked: ChatRequest | CompletionRequest, choices: Sequence[Mapping[str, Any]], replies: Sequence[Reply]
    ) -> dict[str, Any]:
        sampled = sum(len(reply.token_ids) for reply in replies)
        return build_answer(self._endpoint.models[0], asked, choices, len(replies[0].prompt_ids), sampled)

    def _shown(self, reply: Reply, sampling: SamplingParams) -> Shown:
        return read_reply(self._renderer, reply.message, reply.token_ids, reply.finish_reason, sampling)

    def _choice(
        self,
        index: int,
        reply: Reply,
        shown: Shown,
        content: str | Mapping[str, Any],
        asked: ChatRequest | CompletionRequest,
    ) -> dict[str, Any]:
        entry = None
        if asked.wants_log_probs:
            to_text, ids = partial(decode, self._renderer), reply.token_ids.tolist()
            tokens = list(map(SampledToken, ids, (to_text([token]) for token in ids), reply.log_probs.tolist()))
            entry = log_probs_entry(to_text, tokens, shown.text, isinstance(asked, ChatRequest))
        choice = build_choice(index, content, reply.finish_reason, entry)
        if asked.return_token_ids:
            choice |= {"prompt_token_ids": reply.prompt_ids.tolist(), "token_ids": reply.token_ids.tolist()}
        return choice


def _as_openai(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with the arguments of its calls as JSON text, as OpenAI's clients expect."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls, "content": message["content"] or None} if calls else dict(message)
