"""Generation with transformers, in the trainer's own process.

Everything runs in the event loop's thread, one decoding step at a time. Between two steps the loop is free, so that
other coroutines run and an abort takes effect. A thread would not help, because generation and training alternate, and
would make the order of events random.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn

from rollcast.contracts.rollout import (
    BaseRollout,
    EngineLoad,
    RolloutCapabilities,
    RolloutMode,
    RolloutOutput,
    RolloutRequest,
    RolloutSetup,
    WeightReport,
)
from rollcast.contracts.weights import AdapterWeights
from rollcast.errors import CapabilityError, CheckpointError, ConfigError, RollcastError
from rollcast_data.vision.model_inputs import ImageInputs, is_vision_model
from rollcast_hf.adapters import AdapterHooks
from rollcast_hf.decoding import DecodedRow, Decoding
from rollcast_hf.errors import GenerationError
from rollcast_hf.model import build_model, load_model, read_dtype
from rollcast_hf.requests import Job, admit, check_images
from rollcast_hf.sampling import make_streams
from rollcast_hf.schemas import HfRolloutConfig
from rollcast_hf.weights import count_weights, load_buckets
from rollcast_serving.engines.weight_state import WeightState
from rollcast_serving.model_weights import ModelWeights, check_adapter, read_model_config
from rollcast_serving.receiving import WeightTally
from rollcast_serving.requests import OPTIONAL_SAMPLING, ModelLimits, fit_request
from rollcast_serving.stops import StopStrings

if TYPE_CHECKING:
    from rollcast.contracts.engine import BaseEngine

__all__ = ["HfRollout"]


class HfRollout(BaseRollout):
    """A rollout that generates with an engine's module (:meth:`bind_engine`), or with its own copy of the model.

    Requests that are queued in the same turn of the event loop form one batch, in order of arrival. The tokens of a
    request with a seed depend on the seed alone; those of other requests depend on that order and on the sampler's
    state.

    Raises:
        ConfigError: ``max_batch_size`` is below 1.
    """

    capabilities: ClassVar[RolloutCapabilities] = RolloutCapabilities(
        modes=frozenset(RolloutMode),
        in_process=True,
        abort=True,
        lora=True,
        seeds=True,
        continuous_batching=False,
        routing_replay=True,
        multi_modal=True,
        sampling=OPTIONAL_SAMPLING,
    )
    config_schema: ClassVar[type] = HfRolloutConfig

    def __init__(self, setup: RolloutSetup) -> None:
        super().__init__(setup)
        config = cast(HfRolloutConfig, setup.config)
        if config.max_batch_size < 1:
            raise ConfigError(f"rollout.max_batch_size is {config.max_batch_size}, which is not at least 1")
        self._max_rows = config.max_batch_size
        self._records_routing = config.enable_rollout_routing_replay
        # On the CPU for every device: each batch draws one seed from it, so that a batch's samples do not depend on how
        # many numbers earlier batches used.
        self._seeds = torch.Generator().manual_seed(setup.seed)
        self._version = 0
        self._engine: BaseEngine | None = None
        self._engine_size = (0, 0)
        self._limits: ModelLimits | None = None
        self._own: nn.Module | None = None
        #: Image processor of a vision-language model; loaded with the first request.
        self._images: ImageInputs | None = None
        self._sees = False  # True for a vision-language model
        self._stops = StopStrings(setup.model_path, setup.trust_remote_code)
        #: The module while :meth:`generating` holds it.
        self._held: nn.Module | None = None
        self._adapter = AdapterHooks()
        self._weights: ModelWeights | None = None
        self._state = WeightState()
        self._is_closed = False
        self._queue: deque[Job] = deque()
        self._batch: list[Job] = []
        self._decoding: Decoding | None = None
        self._first_row = 0
        self._server: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()  # held by a batch, or by an update of the weights

    @classmethod
    def weight_dtype(cls, config: Any, model_path: str, device: str) -> str:  # noqa: ARG003  # the contract's
        return str(read_dtype(model_path)).removeprefix("torch.")

    def bind_engine(self, engine: BaseEngine, version: int) -> WeightReport:
        """Generate with ``engine``'s module from now on, as ``version``.

        The module is inspected on the first call only; with the same engine again, only the version changes. The
        rollout's own copy is freed.

        Raises:
            CapabilityError: the engine cannot provide its module.
        """
        start = time.perf_counter()
        if self._engine is not engine:
            with engine.in_process_module() as module:
                limits, size = ModelLimits.of(module.config), count_weights(module)
                self._sees = is_vision_model(module.config)
            self._engine, self._limits, self._engine_size = engine, limits, size
            self._own = None
            self._state.accept("weights")
        self._version = version
        tensors, size_bytes = self._engine_size
        return WeightReport(version, tensors, size_bytes, time.perf_counter() - start, {})

    async def update_weights(self, buckets: Iterable[Sequence[tuple[str, Tensor]]], version: int) -> WeightReport:
        """Load full tensors by Hugging Face name into the rollout's own copy of the model.

        The running batch is finished with the old weights first.

        Returns:
            The report of the received tensors, with a checksum of each bucket.

        Raises:
            CapabilityError: an engine is bound, whose module has its own weights.
            WeightUpdateError: a tensor does not fit the model; generation is blocked until an update succeeds.
        """
        if self._engine is not None:
            raise CapabilityError("the rollout generates with an engine's own module, which has its weights already")
        async with self._turn:
            self._adapter.remove()
            if self._own is None:
                self._own = build_model(self.setup.model_path, self.setup.trust_remote_code)
            try:
                # In a thread: the buckets may come from another process, and the loop must stay responsive.
                report = await asyncio.to_thread(load_buckets, self._own, buckets, version)
            except Exception as error:  # also raised in waiting callers
                self._state.fail("weights", version, error)
                raise
            self._state.accept("weights")
            self._version = version
        return report

    async def update_adapter(self, adapter: AdapterWeights, version: int) -> WeightReport:
        """Attach a LoRA adapter to the rollout's own copy of the model, replacing the previous one.

        The running batch is finished without it first.

        Raises:
            CapabilityError: an engine is bound, which has its own adapter.
            WeightUpdateError: the adapter does not fit the model; generation is blocked until an update succeeds.
        """
        if self._engine is not None:
            raise CapabilityError("the rollout generates with an engine's own module, which has its adapter already")
        async with self._turn:
            tally = WeightTally([list(adapter.tensors.items())])
            for _ in tally:
                pass
            try:
                if self._weights is None:
                    self._weights = ModelWeights.of(self.setup.model_path, self.setup.trust_remote_code)
                check_adapter(adapter, self._weights)
                if self._own is None:
                    self._own = load_model(self.setup.model_path, self.setup.trust_remote_code)
                self._adapter.attach(self._own, adapter)
            except RollcastError as error:
                self._state.fail("adapter", version, error)
                raise
            self._state.accept("adapter")
            self._version = version
        return tally.report(version)

    async def generate(self, request: RolloutRequest) -> RolloutOutput:
        """Continue one prompt, in a batch with the other queued requests.

        Raises:
            RequestError: the model cannot serve the request.
            GenerationError: generation failed for its batch (the cause is chained), or the rollout is closed.
            CheckpointError: there is no engine, and ``setup.model_path`` has no model.
            WeightSyncError: the last weight update failed.
        """
        self._check_usable()
        if self._limits is None:
            config = read_model_config(self.setup.model_path, self.setup.trust_remote_code)
            self._limits, self._sees = ModelLimits.of(config), is_vision_model(config)
        request = fit_request(request, self._limits, self.setup.config.on_long_prompt)
        row = admit(request, self._limits, self.setup, self._stops, self.capabilities)
        if (row.images or self._sees) and self._images is None:
            self._images = ImageInputs(self.setup.model_path, self.setup.trust_remote_code)
        if self._images is not None:
            check_images(request, row, self._images)
        loop = asyncio.get_running_loop()
        job = Job(request, loop.create_future(), row)
        self._queue.append(job)
        if self._server is None or self._server.done():
            self._server = loop.create_task(self._serve())
        try:
            return await job.future
        except asyncio.CancelledError:
            self._abort([job])
            raise

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Hold the engine's whole module for any number of batches; all ranks enter together."""
        with self._module() as module:
            self._held = module
            try:
                yield
            finally:
                self._held = None

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End the requests (all for None): queued ones return empty, running ones after the current step."""
        wanted = None if request_ids is None else frozenset(request_ids)
        jobs = [*self._queue, *self._batch]
        self._abort([job for job in jobs if wanted is None or job.request.request_id in wanted])

    async def report_load(self) -> EngineLoad:
        """Return the load: rows of the running batch and of the queue. There is no cache pool."""
        running, waiting = (sum(job.rows for job in jobs) for jobs in (self._batch, self._queue))
        return EngineLoad(self._max_rows, running, waiting)

    def state_dict(self) -> dict[str, Any]:
        """Return the sampler's state ``generator``, uint8 ``[N]``, and the weights' ``version``."""
        return {"generator": self._seeds.get_state(), "version": self._version}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the sampler's state.

        Raises:
            CheckpointError: the state is not one of :meth:`state_dict`.
        """
        try:
            generator, version = state["generator"], int(state["version"])
            self._seeds.set_state(generator)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"this is not a state of the hf rollout: {error!r}") from error
        self._version = version

    def close(self) -> None:
        """Release engine and model; requests in flight are aborted."""
        self._is_closed = True
        self._abort([*self._queue, *self._batch])
        self._engine = self._own = None

    def _check_usable(self) -> None:
        if self._is_closed:
            raise GenerationError("the rollout is closed")
        self._state.check()

    def _abort(self, jobs: Sequence[Job]) -> None:
        chosen = set(jobs)
        for job in [candidate for candidate in self._queue if candidate in chosen]:
            self._queue.remove(job)
            job.answer_empty()
        rows: list[int] = []
        first = -self._first_row  # numbered from the start of the part that is being decoded
        for job in self._batch:
            if job in chosen:
                job.is_aborted = True
                rows.extend(range(first, first + job.rows))
            first += job.rows
        if self._decoding is not None:
            self._decoding.abort(rows)

    async def _serve(self) -> None:
        """Run batches until the queue is empty."""
        try:
            # Lets tasks that were created together with the first one queue their requests too.
            await asyncio.sleep(0)
            while self._queue:
                async with self._turn:
                    self._batch = self._take_batch()
                    await self._run_batch(self._batch)
        finally:
            # Jobs are left here only if the loop was cancelled.
            for job in [*self._batch, *self._queue]:
                job.future.cancel()
            self._queue.clear()
            self._batch = []

    def _take_batch(self) -> list[Job]:
        """Return the longest prefix of the queue that fits into a batch, at least one request."""
        batch = [self._queue.popleft()]
        rows = batch[0].rows
        while self._queue and rows + self._queue[0].rows <= self._max_rows:
            rows += self._queue[0].rows
            batch.append(self._queue.popleft())
        return batch

    async def _run_batch(self, batch: Sequence[Job]) -> None:
        try:
            self._check_usable()
            decoded = await self._decode(batch)
        except RollcastError as error:
            for job in batch:
                failure: RollcastError = copy.copy(error)  # one copy per caller, so that each has its own traceback
                failure.__cause__ = error
                job.fail(failure)
        except Exception as error:  # noqa: BLE001  # raised in the waiting callers
            for job in batch:
                failure = GenerationError(
                    f"generating for request {job.request.request_id!r}, in a batch of {len(batch)} requests, "
                    f"failed: {type(error).__name__}: {error}"
                )
                failure.__cause__ = error
                job.fail(failure)
        else:
            first = 0
            for job in batch:
                job.finish(decoded[first : first + job.rows])
                first += job.rows

    async def _decode(self, batch: Sequence[Job]) -> list[DecodedRow]:
        rows = [job.row for job in batch for _ in range(job.rows)]
        streams = self._make_streams(batch)
        results: list[DecodedRow] = []
        try:
            with self._module() as module:
                device = next(module.parameters()).device
                vocab_size = ModelLimits.of(module.config).vocab_size
                # More than one part only if a single request exceeds the maximum batch size.
                for start in range(0, len(rows), self._max_rows):
                    part = rows[start : start + self._max_rows]
                    self._first_row = start
                    own = streams[start : start + self._max_rows].to(device)
                    self._decoding = Decoding(part, device, vocab_size, own, self._records_routing, self._images)
                    if start and batch[0].is_aborted:
                        self._decoding.abort(range(len(part)))
                    while not self._decoding.done:
                        # Not inference_mode: a model that keeps a tensor from its forward pass, such as rescaled rotary
                        # frequencies, could not be trained with it afterwards.
                        with torch.no_grad():
                            self._decoding.step(module, self._version)
                        await asyncio.sleep(0)
                    results += self._decoding.results()
        finally:
            self._decoding = None
        return results

    def _make_streams(self, batch: Sequence[Job]) -> Tensor:
        """Return a random stream for each sequence, int64 ``[B]``, from the request's own seed or the rollout's."""
        count = sum(job.rows for job in batch)
        seed = int(torch.randint(2**62, (), generator=self._seeds))
        drawn = torch.randint(2**62, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
        numbers = [(job.request.seed, index) for job in batch for index in range(job.rows)]
        # A sequence without a request seed is drawn as if it were alone in its request.
        chosen = [(own, 0) if seed is None else (seed, i) for (seed, i), own in zip(numbers, drawn, strict=True)]
        seeds, indices = zip(*chosen, strict=True)
        return make_streams(torch.tensor(seeds), torch.tensor(indices))

    @contextmanager
    def _module(self) -> Iterator[nn.Module]:
        """Yield the module in eval mode; afterwards restore the train mode of each submodule."""
        if self._held is not None:
            yield self._held
            return
        if self._engine is None:
            if self._own is None:
                self._own = load_model(self.setup.model_path, self.setup.trust_remote_code)
            yield self._own
            return
        with self._engine.in_process_module() as module:
            training = [part for part in module.modules() if part.training]
            module.eval()
            try:
                yield module
            finally:
                for part in training:
                    part.training = True
