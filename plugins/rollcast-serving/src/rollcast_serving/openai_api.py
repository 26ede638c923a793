"""An OpenAI-compatible server over a rollout, from which any agent can sample the policy in training.

Routes: ``/v1/models``, ``/v1/completions``, ``/v1/chat/completions``. In addition to the API's own fields a choice has
``token_ids`` and ``weight_versions``, from which a trainer can build a batch without tokenizing again. A completion's
``prompt`` may be token ids.
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
from rollcast.contracts.tokenizer import read_tokenizer
from rollcast.errors import RequestError, RollcastError
from rollcast_serving.engine_watch import EngineWatch
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
from rollcast_serving.server import Handler, check_token

__all__ = ["build_openai_app"]

_DEFAULT = SamplingParams(max_tokens=256)


class _Chat:
    """The model's tokenizer, loaded when the first text arrives."""

    def __init__(self, path: str, trust_remote_code: bool) -> None:
        self.path, self._trust = path, trust_remote_code

    @functools.cached_property
    def tokenizer(self) -> Any:
        return read_tokenizer(self.path, self._trust)

    def ids(self, body: Mapping[str, Any], chat: bool) -> list[list[int]]:
        """Return the token ids of each prompt."""
        if chat:
            messages = find_messages(body)
            encoded = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            return [self.tokenizer(encoded, add_special_tokens=False)["input_ids"]]
        prompts = find_prompts(body)
        return [self.tokenizer(each)["input_ids"] if isinstance(each, str) else each for each in prompts]

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of token ids."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))


def _before_stop(text: str, stops: Sequence[str]) -> str:
    """Return the text before the first stop string; the API omits the string, but the token ids contain it."""
    return text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]


class _Api:
    def __init__(self, rollout: BaseRollout, model_path: str, watch: EngineWatch, trust_remote_code: bool) -> None:
        self.rollout, self._watch = rollout, watch
        self.name = Path(model_path).name or "model"
        self.chat_model = _Chat(model_path, trust_remote_code)

    async def models(self, request: web.Request) -> web.Response:  # aiohttp passes it
        return models_response(self.name)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, chat=False)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, chat=True)

    async def _answer(self, request: web.Request, chat: bool) -> web.StreamResponse:
        body = await read_body(request)
        sampling, count = read_sampling(body, _DEFAULT, unsupported=("tools",))
        prompts = self.chat_model.ids(body, chat)
        name, sampling = secrets.token_hex(12), replace(sampling, n=count)
        requests = [RolloutRequest(f"{name}-{number}", ids, sampling) for number, ids in enumerate(prompts)]
        outputs = await asyncio.gather(*map(self._generate, requests))
        sequences = [sequence for output in outputs for sequence in output.sequences]
        choices = [self._choice(index, each, sampling, body, chat) for index, each in enumerate(sequences)]
        given = sum(len(sequence.token_ids) for sequence in sequences)
        answer = build_answer(self.name, choices, chat, sum(map(len, prompts)), given)
        return await send_answer(request, body, answer, chat)

    async def _generate(self, request: RolloutRequest) -> RolloutOutput:
        try:
            return await self.rollout.generate(request)
        except Exception as error:
            await self._watch.blame(error)
            raise

    def _choice(
        self, index: int, sequence: RolloutSequence, sampling: SamplingParams, body: Mapping[str, Any], chat: bool
    ) -> dict[str, Any]:
        ids = list(sequence.token_ids)
        text = _before_stop(self.chat_model.text(ids), sampling.stop)
        choice: dict[str, Any] = {
            "index": index,
            "finish_reason": sequence.finish_reason,
            "token_ids": ids,
            "weight_versions": list(sequence.weight_versions),
        }
        choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        if body.get("logprobs") not in (None, False):
            tokens = [str(token) for token in self.chat_model.tokenizer.convert_ids_to_tokens(ids)]
            choice["logprobs"] = log_probs_entry(tokens, list(sequence.log_probs), chat)
        return choice


def _guard(token: str) -> Any:
    """Return middleware that checks the token, and formats errors as OpenAI's API does."""

    @web.middleware
    async def checked(request: web.Request, handler: Handler) -> web.StreamResponse:
        check_token(request, token)
        try:
            return await handler(request)
        except RequestError as error:
            return error_response(400, str(error), "invalid_request_error")
        except RollcastError as error:
            return error_response(503, str(error), "engine_error")

    return checked


def build_openai_app(
    rollout: BaseRollout, model_path: str, token: str, watch: EngineWatch, *, trust_remote_code: bool = False
) -> web.Application:
    """Return the application for agents.

    Args:
        rollout: rollout that answers.
        model_path: folder of the model and tokenizer.
        token: API key.
        watch: health check of the rollout's engine.
    """
    app = web.Application(middlewares=[_guard(token)])
    api = _Api(rollout, model_path, watch, trust_remote_code)
    app.router.add_get("/v1/models", api.models)
    app.router.add_post("/v1/completions", api.completions)
    app.router.add_post("/v1/chat/completions", api.chat)
    return app
