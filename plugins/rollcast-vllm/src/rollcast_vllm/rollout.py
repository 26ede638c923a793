"""Generation with vLLM's AsyncLLM."""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
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
)
from rollcast.contracts.weights import AdapterWeights, WeightReport
from rollcast.errors import CapabilityError, RolloutError, WeightSyncError
from rollcast_data.vision.model_inputs import is_vision_model
from rollcast_serving.casting import loaded_dtype
from rollcast_serving.engines.arguments import (
    has_gpu,
    limit_positions,
    starts_without_weights,
)
from rollcast_serving.engines.job import empty_output
from rollcast_serving.engines.routing import RecordedLayers
from rollcast_serving.engines.weight_state import WeightState
from rollcast_serving.model_weights import ModelWeights, check_adapter, read_model_config
from rollcast_serving.receiving import WeightTally
from rollcast_serving.requests import OPTIONAL_SAMPLING, ModelLimits, check_request, fit_request
from rollcast_serving.stops import StopStrings
from rollcast_vllm.adapters import AdapterFolder
from rollcast_vllm.engine import EngineThread, NodePart, build_llm, prepare_llm
from rollcast_vllm.engine_args import build_engine_args
from rollcast_vllm.environment import pass_images, prepare_environment, process_environment, require_vllm
from rollcast_vllm.images import ImagePrompts
from rollcast_vllm.load import LoadReader
from rollcast_vllm.plugin import register_processor
from rollcast_vllm.sampling import SequenceReader, build_params, check_temperature, read_sequence, states_versions
from rollcast_vllm.schemas import VllmRolloutConfig
from rollcast_vllm.updates import load_weights

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["VllmRollout"]

WEIGHTS, KV_CACHE = "weights", "kv_cache"
ADAPTER_ID = 1


@dataclass(eq=False)
class _Job:
    """A request that is not answered yet.

    Attributes:
        request: the caller's request.
        key: unique id in this rollout.
        keys: ids in vLLM, one per submission.
        base_only: True if the engine computes it without an adapter.
        aborted: True if a caller aborted it.
        failure: error of the update that ended it.
    """

    request: RolloutRequest
    key: str
    keys: list[str] = field(default_factory=list)
    base_only: bool = False
    aborted: bool = False
    failure: WeightSyncError | None = None


class VllmRollout(BaseRollout):
    """A vLLM engine that computes in its own processes.

    It may be used from any event loop. Its weights start as version 0.

    Raises:
        PluginLoadError: vLLM is not installed here.
        ConfigError: vLLM rejects the value of a key in the ``rollout`` section.
        CheckpointError: there is no readable model config.
        CapabilityError: ``enable_rollout_routing_replay`` is set, and the model has no experts.
        RolloutError: the engine did not start.
    """

    capabilities: ClassVar[RolloutCapabilities] = RolloutCapabilities(
        modes=frozenset(RolloutMode),
        abort=True,
        lora=True,
        tensor_parallel=True,
        pipeline_parallel=True,
        data_parallel=True,
        expert_parallel=True,
        multi_node=True,
        releases_memory=True,
        seeds=True,
        multi_modal=True,
        routing_replay=True,
        quantization=frozenset({"fp8"}),
        sampling=OPTIONAL_SAMPLING,
    )
    config_schema: ClassVar[type] = VllmRolloutConfig

    def __init__(self, setup: RolloutSetup) -> None:
        super().__init__(setup)
        config = cast(VllmRolloutConfig, setup.config)
        self._config = config
        prepare_environment(config, setup.node)
        require_vllm()
        self._can_release = config.free_cache_engine and has_gpu()
        trust = self._trust_remote_code = setup.trust_remote_code
        model_config = read_model_config(setup.model_path, trust)
        self._model_type = str(model_config.model_type)
        self._images = _prepare_images(setup.model_path, model_config, trust)
        # The class declares the features on a GPU with default settings and a model that sees images; a CPU has no
        # device memory to release.
        self.capabilities = replace(  # type: ignore[misc]
            type(self).capabilities,
            releases_memory=self._can_release,
            seeds=config.use_request_seeds,
            multi_modal=self._images is not None,
            update_in_flight=states_versions(),
        )
        arguments = build_engine_args(setup, self._images is not None)
        self._stops = StopStrings(setup.model_path, trust)
        self._expected: ModelWeights | None = None
        self._recorded: RecordedLayers | None = None
        if config.enable_rollout_routing_replay:
            self._expected = ModelWeights.of(setup.model_path, trust)
            self._recorded = RecordedLayers.of(setup.model_path, model_config, self._expected)
        self._jobs: dict[str, _Job] = {}
        self._numbers = itertools.count()
        self._turn = asyncio.Lock()  # one update at a time
        self._open = asyncio.Event()  # cleared while the first adapter waits for requests without one
        self._open.set()
        self._version = 0
        self._released: set[str] = set()
        self._adapter: AdapterFolder | None = None
        self._state = WeightState("the engine started without weights" if starts_without_weights(setup) else "")
        self._load = LoadReader()
        inputs = None if self._images is None else self._images.inputs
        self._engine = EngineThread(
            lambda: build_llm(arguments, self._load), functools.partial(prepare_llm, images=inputs)
        )
        self._llm = self._engine.llm
        positions = int(self._llm.model_config.max_model_len)
        self._limits = limit_positions(ModelLimits.of(model_config), positions, "rollout.max_model_len")

    @classmethod
    def environment(cls, config: Any) -> dict[str, str]:
        return process_environment(config)

    @classmethod
    def weight_dtype(cls, config: Any, model_path: str, device: str) -> str | None:  # noqa: ARG003  # the contract's
        return loaded_dtype(config.dtype, device == "cpu")

    @classmethod
    def join(cls, setup: RolloutSetup) -> NodePart:
        config = cast(VllmRolloutConfig, setup.config)
        prepare_environment(config, setup.node)
        require_vllm()
        model_config = read_model_config(setup.model_path, setup.trust_remote_code)
        images = _prepare_images(setup.model_path, model_config, setup.trust_remote_code)
        return NodePart(build_engine_args(setup, images is not None))

    async def generate(self, request: RolloutRequest) -> RolloutOutput:
        """Continue one prompt; cancelling the caller aborts the request.

        Raises:
            CapabilityError: the request has images, and the model is one of text.
            RequestError: the request exceeds the model's limits or the engine's ``max_model_len``, or its placeholders
                do not match its images.
            WeightSyncError: the engine has no usable weights.
            RolloutError: the engine died, or failed at this request.
        """
        self._state.check()
        self._check_images(request)
        request = fit_request(request, self._limits, self._config.on_long_prompt)
        prompt = check_request(request, self._limits, self.capabilities).tolist()
        check_temperature(request)
        self._stops.check(request.request_id, request.sampling.stop)
        return await self._engine.run(self._generate(request, await self._render(request, prompt)))

    def _check_images(self, request: RolloutRequest) -> None:
        if self._images is None and request.multi_modal_data:
            modalities = ", ".join(sorted(request.multi_modal_data))
            raise CapabilityError(
                f"request {request.request_id!r} carries multi_modal_data ({modalities}), but model.path "
                f"{self.setup.model_path} ({self._model_type}) is a model of text; name a vision-language model"
            )

    async def _render(self, request: RolloutRequest, prompt: list[int]) -> dict[str, Any]:
        """Return vLLM's input for a request's prompt and images."""
        if self._images is None:
            return {"type": "token", "prompt_token_ids": prompt}
        dtype = self._llm.model_config.dtype
        if not request.multi_modal_data:
            return self._images.render(request, prompt, dtype)
        # In a thread, because decoding a large image takes long.
        return await asyncio.to_thread(self._images.render, request, prompt, dtype)

    async def _generate(self, request: RolloutRequest, prompt: dict[str, Any]) -> RolloutOutput:
        job = _Job(request, f"{request.request_id}#{next(self._numbers)}")
        self._jobs[job.key] = job
        try:
            await self._open.wait()
            self._state.check()
            if job.aborted:
                return empty_output(request)
            job.base_only = self._adapter is None
            sequences = await self._sample(job, prompt)
        finally:
            del self._jobs[job.key]
        if job.failure is not None:
            raise WeightSyncError(str(job.failure), tensor=job.failure.tensor)
        return RolloutOutput(request.request_id, sequences, request.sampling)

    async def _sample(self, job: _Job, prompt: dict[str, Any]) -> list[RolloutSequence]:
        request = job.request
        seed = request.seed if self._config.use_request_seeds else None
        stop_ids = self.setup.stop_ids(request.sampling)
        if not request.sampling.stop:
            params = build_params(request, stop_ids, seed)
            async with self._submitted(job, job.key, prompt, params) as outputs:
                output = outputs.get_nowait() or await outputs.get()
            version = self._only_version()
            return [read_sequence(request, completion, self._recorded, version) for completion in output.outputs]
        # Separate requests, so that one that has stopped ends while the others continue.
        tasks = [
            asyncio.ensure_future(
                self._sample_until_stop(job, prompt, build_params(request, stop_ids, seed, number), number)
            )
            for number in range(request.sampling.n)
        ]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _sample_until_stop(self, job: _Job, prompt: dict[str, Any], params: Any, number: int) -> RolloutSequence:
        request = job.request
        reader = SequenceReader(request, self._stops.matcher(request.sampling.stop), self._recorded)
        key = f"{job.key}.{number}"
        async with self._submitted(job, key, prompt, params) as outputs:
            ended = False
            while not reader.is_over:
                for completion in (await outputs.get()).outputs:
                    reader.add(completion, self._only_version())
                if reader.has_stopped and not reader.is_over and not ended:
                    await self._llm.abort(key)
                    ended = True
        return reader.sequence()

    def _only_version(self) -> int | None:
        """Return the weight version of all requests in flight; None if vLLM states that of each token."""
        return None if self.capabilities.update_in_flight else self._version

    @asynccontextmanager
    async def _submitted(self, job: _Job, key: str, prompt: dict[str, Any], params: Any) -> AsyncIterator[Any]:
        """Yield the queue of the ``RequestOutput``s; if the caller is cancelled, abort the request.

        AsyncLLM.generate is not used, because it would lose an abort that arrives before the request is queued.
        """
        job.keys.append(key)
        outputs = await self._llm.add_request(key, prompt, params, lora_request=self._adapter_request())
        try:
            if job.aborted or job.failure is not None:
                await self._llm.abort(key)
            yield outputs
        except asyncio.CancelledError:
            if self._engine.death is None:
                await self._llm.abort(outputs.request_id, internal=True)
            raise

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End the requests (all for None); they return with the tokens that have arrived so far."""
        wanted = None if request_ids is None else frozenset(request_ids)
        await self._engine.run(self._abort(wanted))

    async def _abort(self, request_ids: frozenset[str] | None) -> None:
        jobs = [job for job in self._jobs.values() if request_ids is None or job.request.request_id in request_ids]
        for job in jobs:
            job.aborted = True
        await self._llm.abort([key for job in jobs for key in job.keys])

    async def check_health(self) -> None:
        """Check that the engine's process responds.

        Raises:
            RolloutError: it died, or does not respond within ``rollout.health_timeout_s``.
        """
        await self._engine.run(self._check_health())

    async def _check_health(self) -> None:
        if self._turn.locked():
            return  # it responds after the update; its death would end the update
        limit = self._config.health_timeout_s
        try:
            await asyncio.wait_for(self._llm.is_paused(), limit)
        except TimeoutError as error:
            raise RolloutError(f"vLLM's engine has not answered for {limit:g} s") from error

    async def report_load(self) -> EngineLoad:
        """Return the load after the scheduler's last step."""
        return self._load.report(self._config.max_num_seqs)

    async def update_weights(self, buckets: Iterable[Sequence[tuple[str, Tensor]]], version: int) -> WeightReport:
        """Load full tensors by Hugging Face name.

        Requests in flight are paused, lose their keys and values, and continue with the new weights.

        Returns:
            The report of the weights received in the engine's processes.
        """
        return await self._engine.run(self._update_weights(buckets, version))

    async def _update_weights(self, buckets: Iterable[Sequence[tuple[str, Tensor]]], version: int) -> WeightReport:
        async with self._turn:
            self._raise_if_released()
            expected = await self._expect()
            try:
                await self._pause()
                report = await load_weights(self._llm, buckets, expected, version, self.setup.node)
                if self._adapter is not None:
                    self._adapter.write_zeros()
                    await self._load_adapter(self._adapter)
                self._state.accept("weights")
                await self._commit(version)
            except BaseException as error:
                await self._fail(self._state.fail("weights", version, error))
                raise
            return report

    async def update_adapter(self, adapter: AdapterWeights, version: int) -> WeightReport:
        """Load an adapter; requests in flight continue with it, except that the first adapter waits for them to end.

        Raises:
            CapabilityError: ``rollout.enable_lora`` is off, or the rank exceeds ``rollout.max_lora_rank``.
            WeightSyncError: the adapter does not fit the model; the message names the tensor, and generation is blocked
                until an update succeeds.
        """
        if not self._config.enable_lora:
            raise CapabilityError("the rollout supports adapters only with rollout.enable_lora=true")
        rank, largest = int(adapter.config.get("r", 0)), self._config.max_lora_rank
        if rank > largest:
            raise CapabilityError(f"the adapter has rank {rank}, but rollout.max_lora_rank is {largest}")
        return await self._engine.run(self._update_adapter(adapter, version))

    async def _update_adapter(self, adapter: AdapterWeights, version: int) -> WeightReport:
        async with self._turn:
            self._raise_if_released()
            start = time.perf_counter()
            expected = await self._expect()
            try:
                await self._wait_for_base_only()
                await self._pause()
                check_adapter(adapter, expected)
                tally = WeightTally([list(adapter.tensors.items())])
                folder = self._adapter or AdapterFolder()
                loading = time.perf_counter()
                for bucket in tally:
                    folder.write(AdapterWeights(adapter.config, dict(bucket)))
                await self._load_adapter(folder)
                self._adapter = folder
                self._state.accept("adapter")
                await self._commit(version)
            except BaseException as error:
                await self._fail(self._state.fail("adapter", version, error))
                raise
            finally:
                self._open.set()
            now = time.perf_counter()
            return replace(tally.report(version), seconds=now - start, load_seconds=now - loading)

    async def release(self, tags: Sequence[str] = (WEIGHTS, KV_CACHE)) -> None:
        """Release memory on a GPU; vLLM cannot release the weights alone, so the cache is released with them.

        Requests in flight are paused; with ``sleep_level=2`` they are aborted.

        Raises:
            CapabilityError: a tag is unknown.
        """
        _check_tags(tags)
        if self._can_release:
            await self._engine.run(self._release(frozenset(tags)))

    async def _release(self, tags: frozenset[str]) -> None:
        async with self._turn:
            if WEIGHTS in tags and WEIGHTS not in self._released:
                if self._released:
                    await self._llm.wake_up([KV_CACHE])
                level = self._config.sleep_level
                await self._llm.sleep(level, mode="keep" if level == 1 else "abort")
                self._released = {WEIGHTS, KV_CACHE}
            elif KV_CACHE in tags and not self._released:
                await self._llm.pause_generation(mode="keep", clear_cache=True)
                await self._release_cache()
                self._released = {KV_CACHE}

    async def _release_cache(self) -> None:
        if hasattr(self._llm, "release_kv_cache_memory"):
            await self._llm.release_kv_cache_memory()
            return
        # Before 0.31, vLLM releases all memory or none. Not run, as nothing of a release on a GPU.
        await self._llm.sleep(1, mode="keep")
        await self._llm.wake_up([WEIGHTS])

    async def resume(self, tags: Sequence[str] = (WEIGHTS, KV_CACHE)) -> None:
        """Allocate memory again; after ``sleep_level=2`` new weights must follow.

        Raises:
            CapabilityError: a tag is unknown.
        """
        _check_tags(tags)
        if self._can_release:
            await self._engine.run(self._resume(frozenset(tags)))

    async def _resume(self, tags: frozenset[str]) -> None:
        async with self._turn:
            back = self._released & tags
            if not back:
                return
            await self._llm.wake_up(sorted(back))
            self._released -= back
            if WEIGHTS in back and self._config.sleep_level == 2:
                self._state.forbid("weights", "the weights were dropped when their memory was released")

    def close(self) -> None:
        """End the engine's processes; requests in flight get a RolloutError."""
        self._engine.close()
        if self._adapter is not None:
            self._adapter.close()

    @property
    def process_ids(self) -> list[int]:
        """Process ids of the engine."""
        return self._engine.process_ids

    def _raise_if_released(self) -> None:
        if WEIGHTS in self._released:
            raise WeightSyncError("the memory of the weights is released: call resume before an update")

    async def _expect(self) -> ModelWeights:
        if self._expected is None:
            self._expected = await asyncio.to_thread(ModelWeights.of, self.setup.model_path, self._trust_remote_code)
        return self._expected

    async def _wait_for_base_only(self) -> None:
        """Before the first adapter: hold new requests until those without an adapter have ended."""
        if self._adapter is None:
            self._open.clear()
            while any(job.base_only for job in self._jobs.values()):
                await asyncio.sleep(0.01)

    async def _pause(self) -> None:
        """Pause after the current step, and drop all keys and values, including those of running requests."""
        if not self._released:
            await self._llm.pause_generation(mode="keep", clear_cache=True)

    async def _commit(self, version: int) -> None:
        await self._llm.update_weight_version(str(version))
        self._version = version
        if not self._released:
            await self._llm.resume_generation()

    async def _fail(self, failure: WeightSyncError) -> None:
        """End every request with the error of a failed update."""
        jobs = list(self._jobs.values())
        for job in jobs:
            job.failure = failure
        if self._engine.death is None and not self._llm.errored:
            await self._llm.abort([key for job in jobs for key in job.keys])
            if not self._released:
                await self._llm.resume_generation()

    def _adapter_request(self) -> Any:
        from vllm.lora.request import LoRARequest

        return None if self._adapter is None else LoRARequest("rollcast", ADAPTER_ID, self._adapter.path)

    async def _load_adapter(self, folder: AdapterFolder) -> None:
        from vllm.lora.request import LoRARequest

        try:
            await self._llm.add_lora(LoRARequest("rollcast", ADAPTER_ID, folder.path, load_inplace=True))
        except Exception as error:
            if self._llm.errored:
                raise
            raise WeightSyncError(f"vLLM rejects the adapter: {error}") from error


def _prepare_images(model_path: str, model_config: Any, trust_remote_code: bool) -> ImagePrompts | None:
    """Prepare this process, and through the environment the engine's, for the model's images.

    Returns:
        The converter of prompts with images; None for a model of text.

    Raises:
        ConfigError: neither vLLM nor rollcast can pass images to the model.
    """
    architectures = model_config.architectures
    if not is_vision_model(model_config) or not architectures:
        pass_images(None)
        return None
    pass_images(architectures[0])
    prompts = ImagePrompts(model_path, trust_remote_code)
    # vLLM calls this in the engine's processes; in this one it may have loaded its plugins before.
    register_processor()
    return prompts


def _check_tags(tags: Sequence[str]) -> None:
    unknown = [tag for tag in tags if tag not in {WEIGHTS, KV_CACHE}]
    if unknown:
        raise CapabilityError(f"unknown memory tag {unknown[0]!r}; tags: {WEIGHTS}, {KV_CACHE}")
