"""Generation with SGLang, through an HTTP server that the rollout starts as its child."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from rollcast.contracts.rollout import (
    BaseRollout,
    EngineLoad,
    EnginePart,
    RolloutCapabilities,
    RolloutMode,
    RolloutOutput,
    RolloutRequest,
    RolloutSetup,
)
from rollcast.contracts.weights import AdapterWeights, WeightReport
from rollcast.errors import CapabilityError, RolloutError
from rollcast_serving.casting import loaded_dtype
from rollcast_serving.engines.arguments import (
    has_gpu,
    limit_positions,
    starts_without_weights,
)
from rollcast_serving.engines.http_client import RefusedError
from rollcast_serving.engines.job import SequenceSeeds, request_failure
from rollcast_serving.engines.routing import RecordedLayers
from rollcast_serving.engines.server_process import ServerProcess
from rollcast_serving.engines.weight_state import WeightState
from rollcast_serving.model_weights import ModelWeights, read_model_config
from rollcast_serving.requests import ModelLimits, check_request, fit_request
from rollcast_serving.stops import StopStrings
from rollcast_sglang.client import SglangClient
from rollcast_sglang.environment import server_environment
from rollcast_sglang.requests import Adapter, Job, Row, build_batch, read_sequence
from rollcast_sglang.schemas import SglangRolloutConfig
from rollcast_sglang.server_args import SPARE_POSITIONS, build_server_args
from rollcast_sglang.updates import WeightUpdater

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["SglangRollout"]

_ABORT_POLL_S = 0.1
#: Path prefix of files in memory that SGLang removes only when it ends by itself, which takes seconds.
_LEFTOVERS = "/dev/shm/sglang_loads_"  # noqa: S108  # SGLang's choice


def _limits(config: SglangRolloutConfig, model_config: Any) -> ModelLimits:
    return limit_positions(ModelLimits.of(model_config), config.max_model_len, "rollout.max_model_len")


def _start_server(setup: RolloutSetup, limits: ModelLimits) -> tuple[ServerProcess, Path]:
    """Start SGLang's processes on this node; return them and the folder of their files."""
    gpu = has_gpu()
    args = build_server_args(setup, limits.max_positions, gpu)
    environment = server_environment(setup, os.environ, gpu)
    folder = Path(tempfile.mkdtemp(prefix="rollcast-sglang-"))
    return ServerProcess("SGLang", "rollcast_sglang.server", args, environment, folder, _LEFTOVERS), folder


class ServerPart(EnginePart):
    """SGLang's processes on a node other than the first, whose server takes the requests.

    Raises:
        RolloutError: they did not start.
    """

    def __init__(self, setup: RolloutSetup) -> None:
        model_config = read_model_config(setup.model_path, setup.trust_remote_code)
        self._server, self._folder = _start_server(setup, _limits(setup.config, model_config))
        try:
            asyncio.run(SglangClient(self._server).wait_ready(setup.config.replica.launch_timeout_s))
        except BaseException:
            self.close()
            raise

    def check_health(self) -> None:
        if not self._server.is_alive:
            raise self._server.death("SGLang's processes on this node died")

    def close(self) -> None:
        self._server.stop()
        shutil.rmtree(self._folder, ignore_errors=True)


class SglangRollout(BaseRollout):
    """A rollout that generates with its own server.

    The server starts with the object; the first call waits until it is ready. Requests made in one turn of the event
    loop are sent together.

    Raises:
        ConfigError: ``engine_kwargs`` has a key that SGLang does not know or that rollcast sets.
        PluginLoadError: SGLang is not installed here.
        CheckpointError: ``setup.model_path`` has no readable config.
        CapabilityError: ``enable_rollout_routing_replay`` is set, and the model has no experts.
    """

    capabilities: ClassVar[RolloutCapabilities] = RolloutCapabilities(
        modes=frozenset(RolloutMode),
        abort=True,
        lora=True,
        tensor_parallel=True,
        multi_node=True,
        releases_memory=True,
        seeds=True,
        routing_replay=True,
        quantization=frozenset({"fp8"}),
        # SGLang's repetition penalty ignores the prompt, and its min-p is applied after top-k and top-p.
        sampling=frozenset({"logit_bias"}),
    )
    config_schema: ClassVar[type] = SglangRolloutConfig

    def __init__(self, setup: RolloutSetup) -> None:
        super().__init__(setup)
        self._config = cast(SglangRolloutConfig, setup.config)
        gpu = has_gpu()
        self._frees_memory = gpu and self._config.free_cache_engine
        # The class declares the features on a GPU with default settings; a CPU has no device memory to release.
        self.capabilities = dataclasses.replace(  # type: ignore[misc]
            type(self).capabilities, releases_memory=self._frees_memory, lora=self._config.enable_lora
        )
        trust = setup.trust_remote_code
        model_config = read_model_config(setup.model_path, trust)
        self._limits = _limits(self._config, model_config)
        weights = ModelWeights.of(setup.model_path, trust)
        self._recorded: RecordedLayers | None = None
        if self._config.enable_rollout_routing_replay:
            self._recorded = RecordedLayers.of(setup.model_path, model_config, weights)
        self.server, self._folder = _start_server(setup, self._limits)
        self._client = SglangClient(self.server)
        self._stops = StopStrings(setup.model_path, trust)
        ranks = self._config.tensor_model_parallel_size
        self._updater = WeightUpdater(self._client, weights, ranks, self._folder, setup.node)
        self._is_ready = False
        self._state = WeightState(
            f"{setup.model_path} has no weights, and no update has arrived yet" if starts_without_weights(setup) else ""
        )
        self._is_closed = False
        self._rows = 0  # total so far; source of SGLang's ids
        self._seeds = SequenceSeeds("SGLang", setup.seed)
        self._adapters = 0
        self._adapter: Adapter | None = None
        self._jobs: dict[Job, None] = {}
        self._queue: list[Job] = []
        self._is_open = True  # True if queued requests are sent to the server
        self._released: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._locks: tuple[asyncio.AbstractEventLoop, asyncio.Lock, asyncio.Lock] | None = None

    @classmethod
    def weight_dtype(cls, config: Any, model_path: str, device: str) -> str | None:  # noqa: ARG003  # the contract's
        return loaded_dtype(config.dtype, device == "cpu")

    @classmethod
    def join(cls, setup: RolloutSetup) -> ServerPart:
        return ServerPart(setup)

    async def generate(self, request: RolloutRequest) -> RolloutOutput:
        """Continue one prompt.

        Raises:
            RequestError: the model cannot serve the request.
            WeightSyncError: the last weight update failed, or the first has not arrived yet.
            RolloutError: the server died or failed.
        """
        await self._wait_ready()
        self._state.check()
        request = fit_request(request, self._limits, self._config.on_long_prompt)
        prompt = check_request(request, self._limits, self.capabilities)
        self._stops.check(request.request_id, request.sampling.stop)
        loop = asyncio.get_running_loop()
        job = Job(request, loop.create_future(), prompt)
        for number in range(request.sampling.n):
            job.rows.append(Row(job, self._new_id(), self._seeds.choose(request, number)))
        self._jobs[job] = None
        self._queue.append(job)
        loop.call_soon(self._flush)
        try:
            return await job.future
        except asyncio.CancelledError:
            # If the loop itself is ending, the sender is cancelled too, and SGLang notices the closed connection.
            if job.sender is not None and not job.sender.cancelling():
                self._start(self._end([job]))
            raise
        finally:
            self._jobs.pop(job, None)

    async def update_weights(self, buckets: Iterable[Sequence[tuple[str, Tensor]]], version: int) -> WeightReport:
        """Load full tensors by Hugging Face name.

        Requests in flight are paused, and their keys and values are recomputed from their tokens afterwards. Requests
        with an adapter are finished first.

        Raises:
            WeightSyncError: the tensors do not fit the model; the message names one. Requests in flight get the error
                too.
        """
        async with self._alone():
            self._is_open = False
            try:
                while adapted := [job.future for job in self._jobs if job.adapter is not None]:
                    await asyncio.wait(adapted)
                self._adapter = None
                await self._pause()
                try:
                    report = await self._updater.update(buckets, version)
                except BaseException as error:
                    await self._fail_update(error, version)
                    raise
                self._state.accept("weights")
            finally:
                await self._go_on()
        return report

    async def update_adapter(self, adapter: AdapterWeights, version: int) -> WeightReport:
        """Load a LoRA adapter for new requests; requests in flight keep their adapter.

        Raises:
            CapabilityError: ``rollout.enable_lora`` is not set.
            WeightSyncError: it does not fit the model, or SGLang rejected it.
        """
        if not self._config.enable_lora:
            raise CapabilityError("the SGLang rollout supports adapters only with rollout.enable_lora=true")
        async with self._alone():
            self._adapters += 1
            name = f"adapter-{self._adapters}"
            try:
                report = await self._updater.load_adapter(name, adapter, version)
            except BaseException as error:
                self._state.fail("adapter", version, error)
                raise
            self._state.accept("adapter")
            self._adapter = Adapter(name, version)
        return report

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End the requests (all for None): waiting ones return empty, the others with their tokens so far."""
        wanted = None if request_ids is None else frozenset(request_ids)
        await self._end([job for job in self._jobs if wanted is None or job.request.request_id in wanted])

    async def check_health(self) -> None:
        """Wait until the server is ready, then check that it and its schedulers respond.

        Raises:
            RolloutError: it is dead (the message has the end of its log), or does not respond in time.
        """
        await self._wait_ready()
        if not self.server.is_alive:
            raise self.server.death("SGLang's server died")
        if self._is_open:  # while weights are loaded, the schedulers do not respond
            await self._client.server_info(self._config.health_timeout_s)

    async def report_load(self) -> EngineLoad:
        """Return the load of the server's scheduler, which does not report preemptions."""
        await self._wait_ready()
        load = await self._client.load(self._config.health_timeout_s)
        limit = int(load.get("max_running_requests", 0)) or self._config.max_running_requests
        running, waiting = int(load.get("num_running_reqs", 0)), int(load.get("num_waiting_reqs", 0))
        return EngineLoad(limit, running, waiting, float(load.get("token_usage", 0.0)))

    async def release(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Release the memory with these tags (only on a GPU). Requests wait until all memory is back."""
        async with self._alone():
            new = [tag for tag in tags if tag not in self._released]
            if not new:
                return
            self._is_open = False
            await self._pause()
            if self._frees_memory:
                await self._client.change("/release_memory_occupation", {"tags": new})
            self._released.update(new)

    async def resume(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Allocate the memory with these tags again; memory that was not released is unchanged."""
        async with self._alone():
            back = [tag for tag in tags if tag in self._released]
            if back and self._frees_memory:
                await self._client.change("/resume_memory_occupation", {"tags": back})
                if "weights" in back and not self._config.enable_weights_cpu_backup:
                    self._state.forbid("weights", "the weights were dropped when their memory was released")
            self._released.difference_update(back)
            if back:
                await self._go_on()

    def state_dict(self) -> dict[str, Any]:
        return self._seeds.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._seeds.load_state_dict(state)

    def close(self) -> None:
        """Kill the server; requests in flight get a RolloutError."""
        self._is_closed = True
        self.server.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _new_id(self) -> str:
        self._rows += 1
        return f"{self._rows:016x}"

    async def _wait_ready(self) -> None:
        if self._is_closed:
            raise RolloutError("the rollout is closed")
        if self._is_ready:
            return
        async with self._loop_locks()[0]:
            if not self._is_ready:
                limit = self._config.replica.launch_timeout_s
                await self._client.wait_ready(limit)
                info = await self._client.server_info(limit)
                pool = int(info["max_total_num_tokens"]) - SPARE_POSITIONS
                self._limits = limit_positions(self._limits, pool, "rollout.max_total_tokens")
                self._is_ready = True

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Serialize changes of the server."""
        await self._wait_ready()
        async with self._loop_locks()[1]:
            yield

    def _loop_locks(self) -> tuple[asyncio.Lock, asyncio.Lock]:
        """Return locks of the running loop: locks belong to a loop, and a rollout may be used from several in
        succession.
        """
        loop = asyncio.get_running_loop()
        if self._locks is None or self._locks[0] is not loop:
            self._locks = (loop, asyncio.Lock(), asyncio.Lock())
        return self._locks[1:]

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _flush(self) -> None:
        """Send the queued requests as one batch."""
        batch = [job for job in self._queue if not job.future.done()]
        if not self._is_open or not batch:
            return
        self._queue.clear()
        sender = self._start(self._send(batch))
        for job in batch:
            job.adapter, job.sender = self._adapter, sender

    async def _send(self, batch: Sequence[Job]) -> None:
        rows = [row for job in batch for row in job.rows]
        try:
            body = build_batch(rows, self.setup, self._recorded is not None)
            async for event in self._client.generate(body):
                if "error" in event:
                    raise RefusedError(f"SGLang refused a batch of {len(batch)} requests: {event['error']}")
                row = rows[event["index"]]
                sequence = read_sequence(row, event, self._recorded)
                if sequence is not None:
                    row.job.finish(row, sequence)
            raise RolloutError("SGLang returned no answer")
        except Exception as error:  # noqa: BLE001  # raised in the waiting callers
            waiting = [job for job in batch if not job.future.done()]
            if isinstance(error, RefusedError) and len(waiting) > 1:
                await self._send_apart(waiting)
                return
            for job in waiting:
                job.fail(request_failure(error, job.request.request_id))
        finally:
            for row in rows:
                row.is_over = True

    async def _send_apart(self, batch: Sequence[Job]) -> None:
        """Send the requests of a refused batch one by one: SGLang refuses a whole batch because of one request."""
        # SGLang may have started some of the others.
        names = [row.rid for job in batch for row in job.rows]
        await asyncio.gather(*(self._client.change("/abort_request", {"rid": name}) for name in names))
        for job in batch:
            job.rows = [Row(job, self._new_id(), row.seed) for row in job.rows]
            job.sender = self._start(self._send([job]))

    async def _pause(self) -> None:
        # In this mode SGLang evicts requests and recomputes them; its other modes give wrong results.
        await self._client.change("/pause_generation", {"mode": "retract"})

    async def _go_on(self) -> None:
        if self._released:
            return
        try:
            if self.server.is_alive:
                await self._client.change("/continue_generation")
        finally:
            # With a dead server too, so that waiting requests fail instead of hanging.
            self._is_open = True
            self._flush()

    async def _fail_update(self, error: BaseException, version: int) -> None:
        if not self.server.is_alive:
            return
        failure = self._state.fail("weights", version, error)
        for job in self._jobs:
            job.fail(copy.copy(failure))
        await self._client.change("/abort_request", {"abort_all": True})

    async def _end(self, jobs: Sequence[Job]) -> None:
        """Abort jobs, and wait until they have ended."""
        for job in jobs:
            if job in self._queue:
                self._queue.remove(job)
                job.finish_empty()
        while rows := [row for job in jobs for row in job.rows if not row.is_over]:
            # Repeatedly: SGLang ignores an abort that arrives before its request.
            await asyncio.gather(*(self._client.change("/abort_request", {"rid": row.rid}) for row in rows))
            await asyncio.sleep(_ABORT_POLL_S)
