"""An OpenAI-compatible server over a rollout, from which any agent can sample the policy in training.

Routes: ``/v1/models``, ``/v1/models/NAME``, ``/v1/completions``, ``/v1/chat/completions``. In addition to the API's own
fields a choice has ``token_ids`` and ``weight_versions``, from which a trainer can build a batch without tokenizing
again. A completion's ``prompt`` may be token ids.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from aiohttp import web

from rollcast.contracts.rollout import BaseRollout, RolloutOutput, RolloutRequest, RolloutSequence, SamplingParams
from rollcast.errors import RendererError, RequestError
from rollcast_data.chat_template import ChatTemplate
from rollcast_data.tokenizer import encode_texts, read_tokenizer
from rollcast_serving.engine_watch import EngineWatch
from rollcast_serving.openai_bodies import MAX_BODY, read_object
from rollcast_serving.openai_errors import answer_errors, error_response
from rollcast_serving.openai_format import (
    SampledToken,
    build_answer,
    build_choice,
    cut_stop_token,
    cut_text,
    log_probs_entry,
    models_response,
    send_answer,
)
from rollcast_serving.openai_messages import plain_messages
from rollcast_serving.openai_requests import ChatRequest, CompletionRequest, Endpoint, read_chat, read_completion
from rollcast_serving.server import Handler, check_token

__all__ = ["build_openai_app"]


class _Chat:
    """The model's tokenizer, loaded when the first text arrives."""

    def __init__(self, path: str, trust_remote_code: bool) -> None:
        self.path, self._trust = path, trust_remote_code

    @functools.cached_property
    def tokenizer(self) -> Any:
        return read_tokenizer(self.path, self._trust)

    @functools.cached_property
    def template(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer)

    def conversation(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the token ids of a conversation, up to the start of the reply.

        Raises:
            RequestError: the model has no chat template, or it refuses the messages.
        """
        try:
            text = self.template.prompt(plain_messages(messages))
        except RendererError as error:
            raise RequestError(f"the model's chat template refuses the messages: {error}") from error
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def encode(self, text: str) -> list[int]:
        """Return the token ids of the prompt of a completion."""
        return encode_texts(self.tokenizer, [text])[0]

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of token ids."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))


class _Api:
    def __init__(
        self,
        rollout: BaseRollout,
        model_path: str,
        watch: EngineWatch,
        default: SamplingParams,
        trust_remote_code: bool,
    ) -> None:
        self.rollout, self._watch, self._default = rollout, watch, default
        models = dict.fromkeys(("policy", Path(model_path).name or "policy"))
        self.endpoint = Endpoint(tuple(models), seeds="" if rollout.capabilities.seeds else "the rollout has no seeds")
        self.chat_model = _Chat(model_path, trust_remote_code)

    async def models(self, request: web.Request) -> web.Response:
        return models_response(self.endpoint.models, request.match_info.get("name"))

    async def completions(self, request: web.Request) -> web.StreamResponse:
        asked = read_completion(await read_object(request), self.endpoint)
        encode = self.chat_model.encode
        prompts = [encode(prompt) if isinstance(prompt, str) else prompt for prompt in asked.prompt]
        return await self._answer(request, asked, prompts)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await read_object(request)
        asked = read_chat(body, self.endpoint)
        return await self._answer(request, asked, [self.chat_model.conversation(body["messages"])])

    async def _answer(
        self, request: web.Request, asked: ChatRequest | CompletionRequest, prompts: Sequence[Sequence[int]]
    ) -> web.StreamResponse:
        name, sampling = secrets.token_hex(12), replace(asked.sampling(self._default), n=asked.count)
        # The API's seeds are signed.
        seed = None if asked.seed is None else asked.seed % 2**63
        requests = [RolloutRequest(f"{name}-{number}", ids, sampling, seed) for number, ids in enumerate(prompts)]
        outputs = await asyncio.gather(*map(self._generate, requests))
        sequences = [sequence for output in outputs for sequence in output.sequences]
        choices = [self._choice(index, sequence, sampling, asked) for index, sequence in enumerate(sequences)]
        sampled = sum(len(sequence.token_ids) for sequence in sequences)
        answer = build_answer(self.endpoint.models[0], asked, choices, sum(map(len, prompts)), sampled)
        return await send_answer(request, asked, answer)

    async def _generate(self, request: RolloutRequest) -> RolloutOutput:
        try:
            return await self.rollout.generate(request)
        except Exception as error:
            await self._watch.blame(error)
            raise

    def _choice(
        self, index: int, sequence: RolloutSequence, sampling: SamplingParams, asked: ChatRequest | CompletionRequest
    ) -> dict[str, Any]:
        ids, reason, chat = list(sequence.token_ids), sequence.finish_reason, isinstance(asked, ChatRequest)
        text_ids = cut_stop_token(ids, reason, sampling.stop_token_ids)
        text = cut_text(self.chat_model.text(text_ids), sampling.stop)
        entry = None
        if asked.wants_log_probs:
            names = [str(self.chat_model.tokenizer.decode([token])) for token in ids]
            tokens = list(map(SampledToken, ids, names, map(float, sequence.log_probs)))
            entry = log_probs_entry(self.chat_model.text, tokens, text, chat)
        shown = {"role": "assistant", "content": text} if chat else text
        choice = build_choice(index, shown, reason, entry)
        return choice | {"token_ids": ids, "weight_versions": list(sequence.weight_versions)}


def _guard(token: str) -> Any:
    """Return middleware that checks the token, and formats errors as OpenAI's API does."""

    @web.middleware
    async def checked(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            check_token(request, token)
        except web.HTTPUnauthorized as error:
            return error_response(401, (error.text or "").strip(), "invalid_request_error", "invalid_api_key")
        return await answer_errors(request, handler)

    return checked


def build_openai_app(
    rollout: BaseRollout,
    model_path: str,
    token: str,
    watch: EngineWatch,
    default: SamplingParams,
    *,
    trust_remote_code: bool = False,
) -> web.Application:
    """Return the application for agents.

    Args:
        rollout: rollout that answers.
        model_path: folder of the model and tokenizer.
        token: API key.
        watch: health check of the rollout's engine.
        default: sampling parameters that a request does not set.
    """
    app = web.Application(middlewares=[_guard(token)], client_max_size=MAX_BODY)
    api = _Api(rollout, model_path, watch, default, trust_remote_code)
    app.router.add_get("/v1/models", api.models)
    app.router.add_get("/v1/models/{name:.+}", api.models)
    app.router.add_post("/v1/completions", api.completions)
    app.router.add_post("/v1/chat/completions", api.chat)
    return app
