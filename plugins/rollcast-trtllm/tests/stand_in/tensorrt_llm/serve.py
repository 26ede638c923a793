"""The HTTP server, with the routes and the checks of ``tensorrt_llm/serve/openai_server.py``."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from typing import Any

from aiohttp import web

#: Fields of ``CompletionRequest``, which forbids others.
FIELDS = {
    *("model", "prompt", "best_of", "echo", "frequency_penalty", "logit_bias", "logprobs", "max_tokens", "n"),
    *("presence_penalty", "seed", "stop", "stream", "stream_options", "suffix", "temperature", "top_p", "user"),
    *("lora_request", "prompt_ignore_length", "use_beam_search", "top_k", "top_p_min", "min_p", "repetition_penalty"),
    *("length_penalty", "early_stopping", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens"),
    *("skip_special_tokens", "spaces_between_special_tokens", "truncate_prompt_tokens", "return_context_logits"),
    *("detokenize", "add_special_tokens", "response_format", "disaggregated_params"),
}


class OpenAIServer:
    """Serves one engine."""

    def __init__(
        self,
        generator: Any,
        model: str,
        tool_parser: str | None,
        server_role: Any,
        metadata_server_cfg: Any,
        enable_rl_control_endpoints: bool = False,
        rl_control_api_key: str | None = None,
    ) -> None:
        self.generator, self.model = generator, model
        self.key = rl_control_api_key if enable_rl_control_endpoints else None

    async def __call__(self, host: str, port: int) -> None:
        app = web.Application(client_max_size=2**30)
        app.add_routes(
            [
                web.get("/health", self.health),
                web.get("/metrics", self.metrics),
                web.post("/v1/completions", self.complete),
                web.post("/release_memory", self.release),
                web.post("/resume_memory", self.resume),
                web.post("/update_weights", self.update),
            ]
        )
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, host, port, reuse_address=True).start()
        await asyncio.Event().wait()

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def metrics(self, request: web.Request) -> web.Response:
        cache = {"maxNumBlocks": 64, "usedNumBlocks": self.generator.running}
        return web.json_response([{"numActiveRequests": self.generator.running, "kvCacheStats": cache}])

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body.keys() - FIELDS:
            return refuse(f"extra inputs are not permitted: {sorted(body.keys() - FIELDS)}")
        assert body["stream"]
        assert not body["detokenize"]
        assert body["include_stop_str_in_output"]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        async for token, log_prob, reason in self.generator.sample(body["prompt"], body):
            probs = {"text_offset": [0], "token_logprobs": [log_prob], "tokens": ["?"], "top_logprobs": []}
            choice = {"index": 0, "text": "", "token_ids": [token], "logprobs": probs, "finish_reason": reason}
            event = {"id": "cmpl-1", "object": "text_completion", "model": self.model, "choices": [choice]}
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    async def release(self, request: web.Request) -> web.Response:
        return await self.control(request, "sleep", "tags")

    async def resume(self, request: web.Request) -> web.Response:
        return await self.control(request, "wakeup", "tags")

    async def update(self, request: web.Request) -> web.Response:
        return await self.control(request, "update_weights", "weights")

    async def control(self, request: web.Request, method: str, field: str) -> web.Response:
        body = await request.read()
        if self.key is not None:
            expected = f"sha256={hmac.new(self.key.encode(), body, hashlib.sha256).hexdigest()}"
            if request.headers.get("x-trtllm-rl-control-auth") != expected:
                return refuse("Invalid RL control request authentication", 401)
        await self.generator.collective_rpc(method, args=(json.loads(body)[field],))
        return web.json_response({"status": "success"})


def refuse(message: str, code: int = 400) -> web.Response:
    return web.json_response({"object": "error", "message": message, "code": code}, status=code)
