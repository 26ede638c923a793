"""An OpenAI-compatible server over a rollout, so that any agent can sample from the policy in training.

Routes: ``/v1/models``, ``/v1/completions``, ``/v1/chat/completions``. Beside what the API has, a choice says
``token_ids`` and ``weight_versions``, from which a trainer can build a batch without tokenizing again; a
completion's ``prompt`` may be token ids.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from aiohttp import web

from rollcast.contracts.rollout import BaseRollout, RolloutRequest, RolloutSequence, SamplingParams
from rollcast.errors import RequestError
from rollcast_serving.server import guard

__all__ = ["build_openai_app"]

_UNSUPPORTED = ("tools", "functions", "response_format", "logit_bias", "best_of", "suffix", "echo")
_DEFAULT_MAX_TOKENS = 256


class _Chat:
    """The model's tokenizer, loaded when text comes in for the first time."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._tokenizer: Any = None

    @property
    def tokenizer(self) -> Any:
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(self.path)
        return self._tokenizer

    def ids(self, body: Mapping[str, Any], chat: bool) -> list[list[int]]:
        """The prompts' token ids."""
        if chat:
            messages = body.get("messages")
            if not isinstance(messages, list) or not messages:
                raise RequestError("messages has to be a list of messages")
            encoded = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            return [self.tokenizer(encoded, add_special_tokens=False)["input_ids"]]
        prompt = body.get("prompt")
        if isinstance(prompt, str):
            return [self.tokenizer(prompt)["input_ids"]]
        if isinstance(prompt, list) and prompt and all(isinstance(each, int) for each in prompt):
            return [prompt]
        if isinstance(prompt, list) and prompt and all(isinstance(each, list) for each in prompt):
            return cast("list[list[int]]", prompt)
        if isinstance(prompt, list) and prompt and all(isinstance(each, str) for each in prompt):
            return [self.tokenizer(each)["input_ids"] for each in prompt]
        raise RequestError("prompt has to be a text, texts, token ids, or lists of token ids")

    def text(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))


def _sampling(body: Mapping[str, Any], chat: bool) -> SamplingParams:
    for name in _UNSUPPORTED:
        if body.get(name):
            raise RequestError(
                f"{name} is not supported here; supported: n, max_tokens, temperature, top_p, top_k, stop"
            )
    limit = body.get("max_completion_tokens") if chat else None
    limit = limit or body.get("max_tokens") or _DEFAULT_MAX_TOKENS

    def number(name: str, default: float) -> Any:
        value = body.get(name)
        return default if value is None else value

    return SamplingParams(
        temperature=float(number("temperature", 1.0)),
        top_p=float(number("top_p", 1.0)),
        top_k=int(number("top_k", -1)),
        max_tokens=int(limit),
        stop_token_ids=tuple(body.get("stop_token_ids") or ()),
        n=int(number("n", 1)),
        ignore_eos=bool(body.get("ignore_eos", False)),
    )


def _cut(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """The text before the first stop, and whether there was one."""
    places = [text.find(stop) for stop in stops if stop and stop in text]
    return (text[: min(places)], True) if places else (text, False)


class _Api:
    def __init__(self, rollout: BaseRollout, model_path: str) -> None:
        self.rollout = rollout
        self.name = Path(model_path).name or "model"
        self.chat_model = _Chat(model_path)

    async def models(self, request: web.Request) -> web.Response:  # aiohttp gives it
        entry = {"id": self.name, "object": "model", "created": 0, "owned_by": "rollcast"}
        return web.json_response({"object": "list", "data": [entry]})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, chat=False)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, chat=True)

    async def _answer(self, request: web.Request, chat: bool) -> web.StreamResponse:
        body = await request.json()
        if not isinstance(body, dict):
            raise RequestError("the body has to be a JSON object")
        try:
            sampling = _sampling(body, chat)
        except (TypeError, ValueError) as error:
            raise RequestError(str(error)) from error
        prompts = self.chat_model.ids(body, chat)
        identifier = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        outputs = await asyncio.gather(
            *(
                self.rollout.generate(RolloutRequest(f"{identifier}-{number}", ids, sampling))
                for number, ids in enumerate(prompts)
            )
        )
        sequences = [sequence for output in outputs for sequence in output.sequences]
        choices = [self._choice(index, sequence, body, chat) for index, sequence in enumerate(sequences)]
        asked, given = sum(map(len, prompts)), sum(len(sequence.token_ids) for sequence in sequences)
        answer = {
            "id": identifier,
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": self.name,
            "choices": choices,
            "usage": {"prompt_tokens": asked, "completion_tokens": given, "total_tokens": asked + given},
        }
        return await _stream(request, answer, chat) if body.get("stream") else web.json_response(answer)

    def _choice(self, index: int, sequence: RolloutSequence, body: Mapping[str, Any], chat: bool) -> dict[str, Any]:
        stops = body.get("stop") or []
        text, stopped = _cut(self.chat_model.text(sequence.token_ids), [stops] if isinstance(stops, str) else stops)
        choice: dict[str, Any] = {
            "index": index,
            "finish_reason": "stop" if stopped else sequence.finish_reason,
            "token_ids": list(sequence.token_ids),
            "weight_versions": list(sequence.weight_versions),
        }
        choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        if body.get("logprobs") not in (None, False):
            choice["logprobs"] = self._log_probs(sequence, chat)
        return choice

    def _log_probs(self, sequence: RolloutSequence, chat: bool) -> dict[str, Any]:
        tokens = [str(token) for token in self.chat_model.tokenizer.convert_ids_to_tokens(list(sequence.token_ids))]
        if chat:
            return {
                "content": [
                    {"token": token, "logprob": value, "bytes": None, "top_logprobs": []}
                    for token, value in zip(tokens, sequence.log_probs, strict=True)
                ]
            }
        return {"tokens": tokens, "token_logprobs": list(sequence.log_probs), "top_logprobs": None, "text_offset": []}


async def _stream(request: web.Request, answer: Mapping[str, Any], chat: bool) -> web.StreamResponse:
    """The whole answer as one event: for clients that only know how to stream."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    event = dict(answer)
    if chat:
        event["object"] = "chat.completion.chunk"
        event["choices"] = [
            {**{key: value for key, value in choice.items() if key != "message"}, "delta": choice["message"]}
            for choice in answer["choices"]
        ]
    await response.write(f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n".encode())
    await response.write_eof()
    return response


def build_openai_app(rollout: BaseRollout, model_path: str, token: str) -> web.Application:
    """The application that agents talk to; the token is their API key."""
    app = web.Application(middlewares=[guard(token)])
    api = _Api(rollout, model_path)
    app.router.add_get("/v1/models", api.models)
    app.router.add_post("/v1/completions", api.completions)
    app.router.add_post("/v1/chat/completions", api.chat)
    return app
