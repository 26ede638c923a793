"""Generation with TensorRT-LLM, through an HTTP server that the rollout starts as its child.

The endpoints are those of TensorRT-LLM 1.2: ``/v1/completions`` with token ids in and out, ``/release_memory``,
``/resume_memory``, ``/update_weights``, ``/health`` and ``/metrics``.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import os
import shutil
import tempfile
import time
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from rollcast.contracts.rollout import (
    BaseRollout,
    EngineLoad,
    RolloutCapabilities,
    RolloutMode,
    RolloutOutput,
    RolloutRequest,
    RolloutSequence,
    RolloutSetup,
    SamplingParams,
)
from rollcast.contracts.weights import WeightReport
from rollcast.errors import CapabilityError, RolloutError
from rollcast_serving.casting import loaded_dtype
from rollcast_serving.engines.arguments import limit_positions, starts_without_weights
from rollcast_serving.engines.http_client import EngineClient
from rollcast_serving.engines.job import BaseJob, SequenceSeeds
from rollcast_serving.engines.server_process import ServerProcess
from rollcast_serving.engines.steps import StepUpdater
from rollcast_serving.engines.weight_state import WeightState
from rollcast_serving.model_weights import ModelWeights, read_model_config
from rollcast_serving.requests import ModelLimits, check_request, fit_request
from rollcast_serving.stops import StopMatcher, StopStrings, count_until_stop
from rollcast_trtllm.arguments import STEP, build_arguments, require_trtllm, server_environment
from rollcast_trtllm.schemas import TrtllmRolloutConfig

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["TrtllmRollout"]

#: TensorRT-LLM's names for the parts of its memory.
_TAGS = {
    "weights": (
        *("sampler", "drafter", "guided_decoder", "spec_resource_manager"),
        *("model_extra", "executor_extra", "model", "draft_model"),
    ),
    "kv_cache": ("kv_cache",),
}


@dataclass(eq=False)
class _Job(BaseJob):
    """A request in flight.

    Attributes:
        tasks: calls to the server, one per sequence.
        is_aborted: True if it was aborted.
    """

    tasks: list[asyncio.Task[RolloutSequence]] = field(default_factory=list)
    is_aborted: bool = False


class TrtllmRollout(BaseRollout):
    """A rollout with its own server, which starts with the object; the first call waits until it is ready.

    Raises:
        PluginLoadError: TensorRT-LLM is not installed here.
        ConfigError: ``engine_kwargs`` has a key that rollcast sets.
        CheckpointError: ``setup.model_path`` has no readable config.
    """

    capabilities: ClassVar[RolloutCapabilities] = RolloutCapabilities(
        modes=frozenset(RolloutMode),
        abort=True,
        tensor_parallel=True,
        releases_memory=True,
        seeds=True,
    )
    config_schema: ClassVar[type] = TrtllmRolloutConfig

    def __init__(self, setup: RolloutSetup) -> None:
        super().__init__(setup)
        self._config = cast(TrtllmRolloutConfig, setup.config)
        require_trtllm()
        trust = setup.trust_remote_code
        limits = ModelLimits.of(read_model_config(setup.model_path, trust))
        self._limits = limit_positions(limits, self._config.max_model_len, "rollout.max_model_len")
        arguments = build_arguments(setup, self._limits.max_positions)
        self._folder = Path(tempfile.mkdtemp(prefix="rollcast-trtllm-"))
        self.server = ServerProcess(
            "TensorRT-LLM", "rollcast_trtllm.server", arguments, server_environment(os.environ), self._folder
        )
        self._client = EngineClient(self.server)
        self._stops = StopStrings(setup.model_path, trust)
        weights = ModelWeights.of(setup.model_path, trust)
        ranks = self._config.tensor_model_parallel_size
        self._updater = StepUpdater(self._load_step, "TensorRT-LLM", weights, ranks, self._folder)
        self._state = WeightState(
            f"{setup.model_path} has no weights, and no update has arrived yet" if starts_without_weights(setup) else ""
        )
        self._version = 0
        self._seeds = SequenceSeeds("TensorRT-LLM", setup.seed)
        self._is_ready = self._is_closed = False
        self._jobs: dict[_Job, None] = {}
        self._released: set[str] = set()
        #: Resolved when new requests may be sent to the server; None while they may.
        self._held: asyncio.Future[None] | None = None

    @classmethod
    def weight_dtype(cls, config: Any, model_path: str, device: str) -> str | None:  # noqa: ARG003  # the contract's
        return loaded_dtype(config.dtype, on_cpu=False)

    async def generate(self, request: RolloutRequest) -> RolloutOutput:
        """Continue one prompt; each sequence is a separate call, for which the server caches the prompt.

        Raises:
            CapabilityError: TensorRT-LLM does not return log-probs for this sampling.
            RequestError: the model cannot serve the request.
            WeightSyncError: the last weight update failed, or the first has not arrived yet.
            RolloutError: the server died or failed.
        """
        await self._wait_ready()
        self._state.check()
        request = fit_request(request, self._limits, self._config.on_long_prompt)
        prompt = check_request(request, self._limits, self.capabilities)
        _check_distribution(request)
        self._stops.check(request.request_id, request.sampling.stop)
        job = _Job(request, asyncio.get_running_loop().create_future())
        seeds = [self._seeds.choose(request, number) for number in range(request.sampling.n)]
        while self._held is not None:
            await asyncio.shield(self._held)
            self._state.check()
        self._jobs[job] = None
        try:
            job.tasks = [asyncio.ensure_future(self._sample(job, prompt, seed)) for seed in seeds]
            job.answer(await asyncio.gather(*job.tasks))
        finally:
            for task in job.tasks:
                task.cancel()
            job.future.cancel()
            del self._jobs[job]
        return job.future.result()

    async def _sample(self, job: _Job, prompt: array[int], seed: int) -> RolloutSequence:
        sampling = job.request.sampling
        matcher = self._stops.matcher(sampling.stop)
        tokens, log_probs = array("i"), array("f")
        reason = "abort"
        try:
            # The server aborts a request when its connection is closed.
            async with aclosing(self._stream(prompt, sampling, seed)) as choices:
                async for choice in choices:
                    reason = _take(choice, tokens, log_probs, matcher) or reason
                    if reason == "stop":
                        break
        except asyncio.CancelledError:
            if not job.is_aborted:
                raise
        if reason not in {"stop", "length", "abort"} or (reason == "abort" and not job.is_aborted):
            raise RolloutError(f"request {job.request.request_id!r}: TensorRT-LLM ended it with {reason!r}")
        return RolloutSequence(tokens, log_probs, cast(Any, reason), array("q", [self._version]) * len(tokens))

    async def _stream(
        self, prompt: array[int], sampling: SamplingParams, seed: int
    ) -> AsyncGenerator[Mapping[str, Any], None]:
        body = {
            "model": self.setup.model_path,
            "prompt": prompt.tolist(),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "seed": seed,
            "stop_token_ids": list(self.setup.stop_ids(sampling)),
            # The stop token stays in the output; only the request determines what ends a sequence.
            "include_stop_str_in_output": True,
            "ignore_eos": True,
            "add_special_tokens": False,
            "detokenize": False,
            "logprobs": 1,
            "stream": True,
        }
        async with aclosing(self._client.stream("/v1/completions", body)) as events:
            async for event in events:
                for choice in event["choices"]:
                    yield choice

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End the requests (all for None); they return with the tokens that have arrived so far."""
        wanted = None if request_ids is None else frozenset(request_ids)
        for job in self._jobs:
            if wanted is None or job.request.request_id in wanted:
                job.is_aborted = True
                for task in job.tasks:
                    task.cancel()

    async def update_weights(self, buckets: Iterable[Sequence[tuple[str, Tensor]]], version: int) -> WeightReport:
        """Load full tensors by Hugging Face name, after the requests in flight have ended.

        Raises:
            WeightSyncError: the tensors do not fit the model; the message names one.
            RolloutError: the server failed.
        """
        start = time.perf_counter()
        async with self._alone():
            try:
                report = await self._updater.update(buckets, version)
            except BaseException as error:
                self._state.fail("weights", version, error)
                raise
            self._state.accept("weights")
            self._version = version
        return replace(report, seconds=time.perf_counter() - start)

    async def _load_step(self, step: str) -> None:
        await self._control("/update_weights", {"weights": {STEP: step}})

    async def _control(self, path: str, body: Mapping[str, Any]) -> None:
        content = json.dumps(body).encode()
        signature = hmac.new(self.server.api_key.encode(), content, hashlib.sha256).hexdigest()
        headers = {"Content-Type": "application/json", "x-trtllm-rl-control-auth": f"sha256={signature}"}
        await self._client.post(path, content, **headers)

    async def check_health(self) -> None:
        """Wait until the server is ready, then check that its engine responds.

        Raises:
            RolloutError: it is dead (the message has the end of its log), or does not respond in time.
        """
        await self._wait_ready()
        if not self.server.is_alive:
            raise self.server.death("TensorRT-LLM's server died")
        if self._held is None:  # while weights are loaded, the engine does not respond
            await self._client.get("/health", self._config.health_timeout_s)

    async def report_load(self) -> EngineLoad:
        """Return the load after the engine's last step, from its iteration statistics."""
        await self._wait_ready()
        stats = await self._client.get("/metrics", self._config.health_timeout_s)
        last: Mapping[str, Any] = stats[-1] if stats else {}
        cache: Mapping[str, Any] = last.get("kvCacheStats") or {}
        blocks = int(cache.get("maxNumBlocks", 0))
        return EngineLoad(
            self._config.max_num_seqs,
            sum(len(job.tasks) for job in self._jobs),
            int(last.get("numQueuedRequests", 0)),
            int(cache.get("usedNumBlocks", 0)) / blocks if blocks else 0.0,
        )

    async def release(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Release the memory with these tags after the requests in flight have ended; new ones wait until it is
        back.
        """
        new = [tag for tag in tags if tag not in self._released]
        if self._config.free_cache_engine and new:
            async with self._alone():
                await self._control("/release_memory", {"tags": [name for tag in new for name in _TAGS[tag]]})
                self._released.update(new)

    async def resume(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Allocate the memory with these tags again; after the weights' memory an update must follow."""
        back = [tag for tag in tags if tag in self._released]
        if back:
            async with self._alone():
                await self._control("/resume_memory", {"tags": [name for tag in back for name in _TAGS[tag]]})
                self._released.difference_update(back)
                if "weights" in back:
                    self._state.forbid("weights", "the weights were dropped when their memory was released")

    def state_dict(self) -> dict[str, Any]:
        return self._seeds.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._seeds.load_state_dict(state)

    def close(self) -> None:
        """Kill the server; requests in flight get a RolloutError."""
        self._is_closed = True
        self.server.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _wait_ready(self) -> None:
        if self._is_closed:
            raise RolloutError("the rollout is closed")
        if not self._is_ready:
            await self._client.wait_ready(self._config.replica.launch_timeout_s)
            self._is_ready = True

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Hold new requests, and wait for those in flight: the server does not report when weights changed."""
        await self._wait_ready()
        while self._held is not None:
            await asyncio.shield(self._held)
        self._held = asyncio.get_running_loop().create_future()
        try:
            while tasks := [task for job in self._jobs for task in job.tasks]:
                await asyncio.wait(tasks)
                await asyncio.sleep(0)  # let their requests leave the list
            yield
        finally:
            self._held.set_result(None)
            self._held = None


def _check_distribution(request: RolloutRequest) -> None:
    """Check that the server's log-probs, those of the plain softmax, belong to the sampled distribution.

    Raises:
        CapabilityError: they do not; the message names the request and the parameter.
    """
    sampling = request.sampling
    options = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
    allowed: dict[str, tuple[float, ...]] = {"temperature": (0.0, 1.0), "top_p": (1.0,), "top_k": (-1, 0)}
    for name, value in options.items():
        if value not in allowed[name]:
            raise CapabilityError(
                f"request {request.request_id!r}: {name} is {value}; TensorRT-LLM's server returns log-probs before "
                f"temperature, top-p and top-k, so rollout=trtllm allows only {' or '.join(map(str, allowed[name]))}"
            )


def _take(
    choice: Mapping[str, Any], tokens: array[int], log_probs: array[float], matcher: StopMatcher | None
) -> str | None:
    """Append a part of a sequence, up to a stop string; return the reason of its end, None while it continues."""
    new = array("i", choice["token_ids"] or ())
    probs = array("f", (choice.get("logprobs") or {}).get("token_logprobs", ()))
    if len(new) != len(probs):
        raise RolloutError(f"TensorRT-LLM answered with {len(new)} tokens and {len(probs)} log-probs")
    count = None if matcher is None else count_until_stop(matcher, new)
    tokens += new[:count]
    log_probs += probs[:count]
    return "stop" if count is not None else choice.get("finish_reason")
