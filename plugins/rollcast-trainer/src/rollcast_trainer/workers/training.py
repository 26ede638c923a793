"""An engine behind registered methods, and the setup that every worker of a run is built from."""

from __future__ import annotations

import itertools
import logging
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rollcast import Worker, register
from rollcast.contracts.engine import (
    BaseEngine,
    EngineSetup,
    ForwardSettings,
    LossFunction,
    ModelConfig,
    ModelType,
    OptimConfig,
    engines,
)
from rollcast.protocol import DataProto, Jagged
from rollcast_dispatch import make_nd_compute_dataproto_dispatch_fn
from rollcast_trainer.batch.mini_batches import UpdatePlan

__all__ = ["ModelWorker", "TrainingWorker", "WorkerSetup", "leave_process_group"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerSetup:
    """The picklable setup that the workers of a run are built from.

    Attributes:
        engine: the engine's own config, an instance of its schema, whose ``name`` is its registry name.
        optim: optimizer settings; None for a worker that never trains.
        rollout: the rollout's config; None for a worker that never generates.
        rollout_dtype: dtype in which replicas of the rollout hold the weights; None if unknown or without replicas.
        loss_function: loss that ``update_actor`` minimises.
        has_reference: keep a frozen copy of the initial model. An actor that trains an adapter needs no copy: its base
            model is the reference.
        offload_reference: keep that copy in host memory between passes.
        reference_moves: the copy's weights change during the run, so checkpoints contain them.
        stop_token_ids: ids that end every response; the tokenizer's EOS is the first.
        forward, infer: settings of passes that train, and of passes that only compute outputs.
        key: config section that the role's ``engine`` belongs to, for messages.
    """

    model: ModelConfig
    engine: Any
    optim: OptimConfig | None
    rollout: Any
    loss_function: LossFunction | None
    has_reference: bool
    seed: int
    pad_token_id: int
    eos_token_id: int
    stop_token_ids: tuple[int, ...]
    forward: ForwardSettings
    infer: ForwardSettings
    offload_reference: bool = False
    reference_moves: bool = False
    key: str = "actor"
    rollout_dtype: str | None = None


class TrainingWorker(Worker):
    """Worker that exposes an engine through registered methods; its mesh is ``train``.

    Args:
        setup: setup of the run's workers.
        frozen: build no optimizer.
        model_type: kind of output that the model has.
        prefix: prefix of the optimizer's metrics.
        offload: keep the model in host memory outside :meth:`on_device`.
    """

    def __init__(
        self,
        setup: WorkerSetup,
        frozen: bool = False,
        model_type: ModelType = "language_model",
        prefix: str = "actor",
        offload: bool = False,
    ) -> None:
        self.setup = setup
        self.prefix = prefix
        self.offload = offload
        engine_class = engines.get(setup.engine.name, requested_by=f"{setup.key}.engine.name")
        self.engine: BaseEngine = engine_class(
            EngineSetup(
                model_type=model_type,
                model=setup.model,
                engine=setup.engine,
                optim=None if frozen else setup.optim,
                context=self.context,
                seed=setup.seed,
                section=setup.key,
            )
        )

    @register(dispatch_mode="one_to_all")
    def init_model(self) -> None:
        """Build the model, and register the mesh with the worker's data-parallel rank."""
        self.engine.initialize()
        self.register_mesh("train", self.engine.get_data_parallel_rank(), self.engine.is_mp_src_rank_with_outputs())
        if self.offload:
            self.engine.to("cpu", optimizer=False, grad=False)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Keep the model on the device during the block."""
        if not self.offload:
            yield
            return
        self.engine.to("accelerator", optimizer=False, grad=False)
        try:
            yield
        finally:
            self.engine.to("cpu", optimizer=False, grad=False)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("train"))
    def train_mini_batches(
        self, data: DataProto, plan: UpdatePlan, loss_function: LossFunction, settings: ForwardSettings
    ) -> list[dict[str, float]]:
        """Take optimizer steps over the plan's mini-batches, then one step of the schedule.

        Returns:
            The mean of each metric over the steps, one dict per rank and equal on all ranks.
        """
        starts = itertools.accumulate(plan.rows_per_rank, initial=0)
        pieces = [data.slice(start, start + rows) for start, rows in zip(starts, plan.rows_per_rank, strict=False)]
        steps: list[dict[str, float]] = []
        with self.engine.train_mode():
            for _ in range(plan.epochs):
                for piece, denominators in zip(pieces, plan.denominators, strict=True):
                    step_settings = replace(settings, denominators=denominators)
                    output = self.engine.train_batch(piece, loss_function, step_settings)
                    if output.skipped:
                        logger.warning(
                            "%s: the gradient's norm is %s, so an optimizer step is skipped; columns of the mini-batch "
                            "that are not finite: %s",
                            self.prefix,
                            output.grad_norm,
                            ", ".join(_not_finite(piece)) or "none, so the model's own outputs are not",
                        )
                    steps.append(
                        {
                            **output.metrics,
                            f"{self.prefix}/grad_norm": output.grad_norm,
                            f"{self.prefix}/lr": output.lr,
                            f"{self.prefix}/skipped_steps": float(output.skipped),
                        }
                    )
            self.engine.lr_scheduler_step()
        return [_mean(steps)]

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("train"))
    def infer_batch(self, data: DataProto, settings: ForwardSettings) -> DataProto:
        """Return ``log_probs`` (and ``entropy``) or ``values`` of the response tokens, jagged float32."""
        with self.on_device(), self.engine.eval_mode():
            return self.engine.infer_batch(data, settings)[0]


class ModelWorker(Worker):
    """Base of workers with engines: their checkpoints, their state in records of calls, and the end of the process.

    Args:
        setup: setup of the run's workers.
    """

    def __init__(self, setup: WorkerSetup) -> None:
        self.setup = setup
        self.is_built = False

    def trained(self) -> dict[str, BaseEngine]:
        """Return the engines whose state checkpoints contain, by folder; none for a model that does not train."""
        return {}

    @abstractmethod
    def init_model(self) -> None:
        """Build the models, and register the mesh."""

    def register_engine(self, mesh: str, engine: BaseEngine) -> None:
        """Register a mesh with the engine's data-parallel rank; the models are built."""
        self.register_mesh(mesh, engine.get_data_parallel_rank(), engine.is_mp_src_rank_with_outputs())
        self.is_built = True

    @register(dispatch_mode="one_to_all")
    def save_checkpoint(self, path: str) -> None:
        """Write the worker's state under ``path``.

        Raises:
            CheckpointError: something could not be written.
        """
        for name, engine in self.trained().items():
            engine.save_checkpoint(Path(path) / name)
        self.save_further(Path(path))

    @register(dispatch_mode="one_to_all")
    def start_checkpoint(self, path: str) -> None:
        """Start writing a checkpoint in the background; complete it with :meth:`finish_checkpoint`."""
        for name, engine in self.trained().items():
            engine.start_checkpoint(Path(path) / name)
        self.save_further(Path(path))

    @register(dispatch_mode="one_to_all")
    def finish_checkpoint(self, wait: bool) -> bool:
        """Return True if everything that :meth:`start_checkpoint` began is written.

        Raises:
            CheckpointError: it could not be written.
        """
        return all(engine.finish_checkpoint(wait) for engine in self.trained().values())

    @register(dispatch_mode="one_to_all")
    def load_checkpoint(self, path: str) -> None:
        """Restore the state that :meth:`save_checkpoint` wrote.

        Raises:
            CheckpointError: the state is incomplete or belongs to another model.
        """
        for name, engine in self.trained().items():
            engine.load_checkpoint(Path(path) / name)
        self.load_further(Path(path))

    def save_further(self, folder: Path) -> None:
        """Write state besides that of the engines; raises CheckpointError if it cannot be written."""

    def load_further(self, folder: Path) -> None:
        """Restore the state of :meth:`save_further`; raises CheckpointError if it cannot be read."""

    def record_state(self, folder: str) -> None:
        """Save a checkpoint for a record of calls, if the model is built."""
        if self.is_built:
            self.save_checkpoint(folder)

    def replay_state(self, folder: str) -> None:
        """Build the model, and load its checkpoint; nothing if it was not built when the call was recorded."""
        trained = self.trained()
        if trained and not all((Path(folder) / name).exists() for name in trained):
            return
        self.init_model()
        self.load_checkpoint(folder)

    def close(self) -> None:
        """Leave the process group."""
        leave_process_group()


def _not_finite(data: DataProto) -> list[str]:
    """Return the names of the columns in which a number under the mask, or a row's number, is not finite."""
    inside = Jagged.of(data["response_mask"]).values.bool() if "response_mask" in data else None
    names = []
    for name, column in data.batch.items():
        if not isinstance(column, torch.Tensor):
            continue
        is_jagged = column.layout == torch.jagged
        values = Jagged.of(column).values if is_jagged else column
        if not values.is_floating_point():
            continue
        if is_jagged and inside is not None and len(values) == len(inside):
            values = values[inside]
        if not bool(values.isfinite().all()):
            names.append(str(name))
    return sorted(names)


def leave_process_group() -> None:
    """Leave torch's process group if the process is in one; may be called twice."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _mean(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    metrics = {key: [step[key] for step in steps if key in step] for key in {key: 0 for step in steps for key in step}}
    return {key: sum(values) / len(values) for key, values in metrics.items()}
