"""Dry runs of a run's workers: the models of one pool, on one of its ranks, through the passes of a step."""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rollcast import ClassWithInitArgs, WorkerHost, compose
from rollcast.contracts.algorithm import Denominators
from rollcast.contracts.engine import BaseEngine, ForwardSettings
from rollcast.contracts.worker import WorkerContext
from rollcast.errors import ConfigError
from rollcast.protocol import DataProto, Jagged
from rollcast_algorithms.losses import ENTROPY_COEFF, PpoLoss
from rollcast_automap.contract import DeviceKind
from rollcast_automap.memory.role_specs import largest_pass
from rollcast_dryrun.engines import own_groups
from rollcast_dryrun.harness import fake_cuda
from rollcast_dryrun.models import write_sparse_model
from rollcast_dryrun.record import Recorder
from rollcast_dryrun.report import FIRST_SYNC, SHORTER
from rollcast_engine.hf import load_hf_config
from rollcast_serving.casting import WeightCast
from rollcast_serving.syncs.sending import pack_buckets
from rollcast_trainer.api import (
    ActorRolloutRefWorker,
    CriticWorker,
    ModelWorker,
    ParallelSizes,
    RefWorker,
    RewardModelWorker,
    Role,
    Run,
    RunSettings,
    UpdatePlan,
    WorkerSetup,
    check_run,
    data_parallel_size,
    list_workers,
    placed_as,
)

__all__ = ["Pass", "dry_run_rank", "models_of"]

#: Token columns that losses read, besides those that they declare.
_COLUMNS = ("old_log_probs", "advantages", "returns", "values")


@dataclass(frozen=True)
class Pass:
    """A pass of a step over a rank's rows.

    Attributes:
        name: name of the phase.
        call: runs the pass on a number of micro-batches.
        micro_batches: micro-batches of a mini-batch, or of the step if the pass has none.
        mini_batches: mini-batches of a step.
        run: micro-batches to run at least, so that every kind of work is seen.
    """

    name: str
    call: Callable[[int], object]
    micro_batches: int
    mini_batches: int = 1
    run: int = 1


def dry_run_rank(
    overrides: Sequence[str], config_dir: str | None, pool: str, rank: int, device: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the record of a step of a run's models on a rank of a pool, as a value of JSON; for another process.

    Args:
        overrides: arguments of ``rollcast train``.
        config_dir: further folder of configurations.
        pool: name of the pool.
        rank: rank in the pool.
        device: fields of its :class:`~rollcast_automap.contract.DeviceKind`.
    """
    composed = compose(overrides, None if config_dir is None else Path(config_dir), needs_trainer=True)
    composed.load_plugins()
    step = _Step(check_run(composed.config), pool)
    kind = DeviceKind(**device)
    received = None if not rank or step.stages < 2 else step.announced(kind)
    recorder, passes = step.run(rank, kind, received)
    return {
        "faults": [f"{fault.text} ({fault.kind}, {fault.place})" for fault in recorder.faults.values()],
        "phases": {name: phase.as_dict() for name, phase in recorder.phases.items() if name},
        "passes": {
            step_pass.name: {
                "micro_batches": step_pass.micro_batches,
                "mini_batches": step_pass.mini_batches,
                "run": step_pass.run,
            }
            for step_pass in passes
        },
    }


def models_of(settings: RunSettings, pool: str) -> dict[str, tuple[type[ModelWorker], WorkerSetup]]:
    """Return the workers with models in a pool by role, and the setups that they are built from."""
    workers, _ = list_workers(settings, Run(settings).stages, total_steps=1)
    return {
        role: (worker.cls, worker.args[0])
        for role, worker in workers.items()
        if settings.pool_of(placed_as(role)) == pool and issubclass(worker.cls, ModelWorker)
    }


class _Step:
    """A step of the models of one pool.

    Attributes:
        stages: pipeline stages of the deepest model.
    """

    def __init__(self, settings: RunSettings, pool: str) -> None:
        self._settings = settings
        self._pool = settings.pools.resource_pool_dict[pool]
        self._workers = models_of(settings, pool)
        sizes = [ParallelSizes.read(setup.engine).pipeline for _, setup in self._workers.values()]
        self.stages = max(sizes, default=1)

    def announced(self, device: DeviceKind) -> dict[str, list[list[int]]]:
        """Return the shapes that the stages of a pipeline tell each other, by phase.

        They are those of the first stage, which is told none that it has not sent; they do not depend on its layers.
        """
        layers = max(
            self.stages * (getattr(setup.engine, "virtual_pipeline_model_parallel_size", None) or 1)
            for _, setup in self._workers.values()
        )
        try:
            recorder, _ = self.run(0, device, None, layers)
        except ConfigError:  # the engine's keys give the stages numbers of layers
            recorder, _ = self.run(0, device, None)
        return {name: phase.sent for name, phase in recorder.phases.items()}

    def run(
        self,
        rank: int,
        device: DeviceKind,
        received: Mapping[str, Sequence[Sequence[int]]] | None,
        layers: int | None = None,
    ) -> tuple[Recorder, list[Pass]]:
        """Run the step on a rank; return the record and the passes.

        Args:
            rank: rank in the pool.
            device: kind of device.
            received: phase → whole numbers that the rank receives from others.
            layers: layers of each model; None for those of its configuration.
        """
        counts = self._pool.process_on_nodes
        place = self._place(rank)
        host = WorkerHost()
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rollcast-dryrun-")))
            roles = {
                role: ClassWithInitArgs(worker, _without_weights(setup, folder / role, layers))
                for role, (worker, setup) in self._workers.items()
            }
            stack.enter_context(own_groups())
            recorder = stack.enter_context(fake_cuda(self._pool.world_size, rank, device, max(counts), received))
            host.build(place, roles)
            workers = list(host.workers.values())
            with recorder.phase("init"):
                for worker in workers:
                    worker.init_model()  # type: ignore[attr-defined]  # all are ModelWorkers
            passes = [step_pass for worker in workers for step_pass in self._passes(worker)]
            for step_pass in passes:
                _record(recorder, step_pass)
            for worker in workers:
                if isinstance(worker, ActorRolloutRefWorker) and self._settings.uses_replicas:
                    self._sync(recorder, worker.actor.engine)
            torch.cuda.empty_cache()
            with recorder.phase("generate"):
                pass  # what the models hold while the rollout has the device
        return recorder, passes

    def _place(self, rank: int) -> WorkerContext:
        return WorkerContext(
            rank=rank,
            world_size=self._pool.world_size,
            local_rank=self._pool.local_rank_list()[rank],
            local_world_size=self._pool.local_world_size_list()[rank],
            master_port=1,
            device_index=0,
            role="dry run",
        )

    def _passes(self, worker: Any) -> Iterator[Pass]:
        """Yield the passes of a worker's models, in the order of a step."""
        setup: WorkerSetup = worker.setup
        called = {place.name for place in self._settings.places}

        def forward(name: str, call: Callable[[DataProto], object]) -> Pass:
            prompts = self._settings.algebra.prompts
            rows, count = self._largest(setup, setup.infer, prompts)
            return Pass(name, lambda n: call(self._batch(n * rows, setup)), count, run=min(count, 2))

        if isinstance(worker, ActorRolloutRefWorker):
            if called & {"old_log_prob", "log_prob_check"}:
                yield forward("actor: log-probs", worker.compute_log_prob)
            if setup.has_reference and Role.REF in self._settings.roles:
                yield forward("reference: log-probs", worker.compute_ref_log_prob)
            yield self._update("actor: update", worker.update_actor, setup)
        elif isinstance(worker, RefWorker):
            yield forward("reference: log-probs", worker.compute_ref_log_prob)
        elif isinstance(worker, CriticWorker):
            yield forward("critic: values", worker.compute_values)
            yield self._update("critic: update", worker.update_critic, setup)
        elif isinstance(worker, RewardModelWorker):
            yield forward("reward model: scores", worker.compute_rm_score)

    def _update(self, name: str, call: Callable[[DataProto, UpdatePlan], object], setup: WorkerSetup) -> Pass:
        algebra = self._settings.algebra
        rows, count = self._largest(setup, setup.forward, algebra.mini_batch_prompts)
        longest = self._settings.data.max_response_length

        def update(micro_batches: int) -> None:
            number = micro_batches * rows
            tokens = float(number * longest)
            plan = UpdatePlan([number], [Denominators(tokens, float(number), float(longest))])
            call(self._batch(number, setup), plan)

        at_work = min(count, max(2, ParallelSizes.read(setup.engine).pipeline))
        return Pass(name, update, count, algebra.mini_batches * algebra.epochs, at_work)

    def _largest(self, setup: WorkerSetup, settings: ForwardSettings, prompts: int) -> tuple[int, int]:
        """Return the rows of the largest micro-batch on a rank, and the micro-batches."""
        data = self._settings.data
        algebra = replace(
            self._settings.algebra,
            dp_size=data_parallel_size(setup.engine, self._pool.world_size),
            mini_batch_prompts=prompts,
            micro_batch_rows=settings.micro_batch_size_per_gpu,
        )
        rows = largest_pass(algebra, data.max_prompt_length + data.max_response_length)
        return rows, -(-algebra.rows_per_rank // rows)

    def _batch(self, rows: int, setup: WorkerSetup) -> DataProto:
        """Return rows of the greatest length, with all columns that the setup's loss reads."""
        data = self._settings.data

        def column(length: int) -> Jagged:
            lengths = torch.full((rows,), length)
            return Jagged.from_lengths(torch.ones(rows * length, dtype=torch.int32), lengths)

        prompts, responses = column(data.max_prompt_length), column(data.max_response_length)
        numbers = responses.with_values(torch.zeros(len(responses.values)))
        mask = responses.with_values(torch.ones(len(responses.values), dtype=torch.bool))
        loss = setup.loss_function
        named = loss.needs.columns if isinstance(loss, PpoLoss) else ()
        columns: dict[str, Any] = dict.fromkeys((*_COLUMNS, *named), numbers)
        if isinstance(loss, PpoLoss) and loss.prepares:
            flat = {name: column.values.unsqueeze(0) for name, column in columns.items()}
            tokens = mask.values.long().unsqueeze(0)
            prepared = loss.prepare(flat["old_log_probs"], flat["advantages"], tokens, flat)
            columns |= {name: numbers.with_values(values.squeeze(0)) for name, values in prepared.items()}
        if isinstance(loss, PpoLoss) and loss.use_adaptive_entropy:
            columns[ENTROPY_COEFF] = torch.zeros(rows)
        columns |= {"prompts": prompts, "responses": responses, "response_mask": mask}
        return DataProto(columns, length=rows)

    def _sync(self, recorder: Recorder, engine: BaseEngine) -> None:
        """Gather the weights in buckets; those below an adapter once, as in a run."""
        size = self._settings.rollout.update_weights_bucket_megabytes << 20
        dtype, model = self._settings.rollout_dtype, engine.setup.model
        cast = WeightCast.of_model(dtype, model.path, model.trust_remote_code) if dtype else None
        adapts = model.trains_adapter
        with recorder.phase(FIRST_SYNC if adapts else "sync"):
            deque(pack_buckets(engine.get_per_tensor_param(), size, cast), maxlen=0)
        if adapts:
            with recorder.phase("sync"):
                engine.get_adapter()


def _without_weights(setup: WorkerSetup, folder: Path, layers: int | None) -> WorkerSetup:
    """Return a setup whose model has weights of zeros that take no room, in a new folder, and without a rollout."""
    config: Any = load_hf_config(setup.model)
    text = config.get_text_config()
    if layers is not None:
        text.num_hidden_layers = layers
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[:layers]
    folder.mkdir()
    write_sparse_model(folder, config)
    # The folder's configuration has the changes of override_config.
    model = replace(setup.model, path=str(folder), override_config={}, random_init=False, use_shm=False)
    return replace(setup, model=model, rollout=None)


def _record(recorder: Recorder, step_pass: Pass) -> None:
    """Run a pass twice if it has several micro-batches: the difference is the cost of one."""
    if step_pass.run > 1:
        with recorder.phase(step_pass.name + SHORTER):
            step_pass.call(step_pass.run - 1)
    with recorder.phase(step_pass.name):
        step_pass.call(step_pass.run)
