"""Behaviour that torch training engines share, independent of how they split the model."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from rollcast.contracts.device import disable_tf32, local_device, set_device
from rollcast.contracts.engine import BaseEngine, EngineSetup
from rollcast.errors import CheckpointError
from rollcast_engine.optim import check_optim, learning_rate
from rollcast_engine.pending_save import PendingSave
from rollcast_engine.process_group import agree
from rollcast_engine.sharded_checkpoint import ShardedState, load, save, start_save

if TYPE_CHECKING:
    from rollcast.contracts.engine import OptimConfig

__all__ = ["TorchEngine"]

_Optimizer = TypeVar("_Optimizer")


class TorchEngine(BaseEngine):
    """Base of engines: train and eval mode, the schedule, checkpoints, and exports that fail on all ranks or on none.

    A subclass implements :meth:`mode`, :meth:`checkpoint_state` (or its own checkpoints), :meth:`write_export` and the
    remaining methods of :class:`BaseEngine`.

    Attributes:
        device: device of the model; the CPU before :meth:`use_local_device`.
        schedule_step: completed steps of the learning-rate schedule; saved in checkpoints.

    Raises:
        ConfigError: a key of ``optim`` has an invalid value.
    """

    def __init__(self, setup: EngineSetup) -> None:
        super().__init__(setup)
        if setup.optim is not None:
            check_optim(setup.optim, f"{setup.section}.optim")
        self.device = torch.device("cpu")
        self.schedule_step = 0
        self._pending_save: PendingSave | None = None
        self._checkpoint_group: dist.ProcessGroup | None = None

    def checkpoint_state(self) -> ShardedState:
        """Return the state that checkpoints hold, with the engine's own tensors."""
        raise NotImplementedError(f"{type(self).__name__} overrides neither checkpoint_state nor save_checkpoint")

    def holding_weights(self) -> AbstractContextManager[None]:
        """Return a context in which the tensors of :meth:`checkpoint_state` are in memory."""
        return nullcontext()

    def on_loaded(self) -> None:  # most engines have nothing to forget
        """Forget what was derived from the weights before a checkpoint was loaded."""

    def save_checkpoint(self, path: Path) -> None:
        """Write model, optimizer, schedule and every rank's RNG under ``path``.

        Raises:
            CheckpointError: the folder cannot be written.
        """
        self.finish_checkpoint(wait=True)
        with self.holding_weights():
            save(path, self.checkpoint_state())

    def start_checkpoint(self, path: Path) -> None:
        """Copy the state to host memory, and write it from there while training goes on.

        Raises:
            CheckpointError: the folder cannot be written, or the previous checkpoint could not be.
        """
        self.finish_checkpoint(wait=True)
        if self.setup.context.world_size > 1 and self._checkpoint_group is None:
            # Collectives of the writing thread must not interleave with those of training.
            self._checkpoint_group = dist.new_group(backend="gloo")
        with self.holding_weights():
            self._pending_save = start_save(path, self.checkpoint_state(), self._checkpoint_group)

    def finish_checkpoint(self, wait: bool) -> bool:
        """Complete a checkpoint in flight; see :meth:`rollcast.contracts.engine.BaseEngine.finish_checkpoint`."""
        pending, self._pending_save = self._pending_save, None
        if pending is None or pending.finish(wait):
            return True
        self._pending_save = pending
        return False

    def load_checkpoint(self, path: Path) -> None:
        """Load a checkpoint of :meth:`save_checkpoint`, on the same or another number of ranks or mesh.

        Raises:
            CheckpointError: the folder is incomplete, damaged, or belongs to another model; the message names the
                differences.
        """
        with self.holding_weights():
            self.schedule_step = load(path, self.checkpoint_state())
        self.on_loaded()

    def use_local_device(self) -> None:
        """Compute on this rank's accelerator from now on, if the machine has one."""
        self.device = local_device(self.setup.context.local_rank)
        disable_tf32()
        set_device(self.device)

    @abstractmethod
    def mode(self, training: bool) -> AbstractContextManager[None]:
        """Enter train or eval mode with the weights on the device."""

    @contextmanager
    def train_mode(self) -> Iterator[None]:
        """Enable dropout and gradients and keep the weights on the device during the block."""
        with self.mode(training=True), torch.enable_grad():
            yield

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        """Disable dropout and gradients during the block.

        This uses ``no_grad``: weights gathered under ``inference_mode`` could not be trained afterwards.
        """
        with self.mode(training=False), torch.no_grad():
            yield

    @property
    def optim(self) -> OptimConfig:
        """Optimizer settings.

        Raises:
            TypeError: the engine was built for inference only.
        """
        if self.setup.optim is None:
            raise TypeError("this engine was built without optim: it computes log-probs or values, and cannot train")
        return self.setup.optim

    def require_optimizer(self, optimizer: _Optimizer | None) -> _Optimizer:
        """Return the optimizer after checking that the engine is initialized.

        Raises:
            TypeError: the engine was built for inference only.
            RuntimeError: the engine is not initialized.
        """
        name = self.optim.optimizer
        if optimizer is None:
            raise RuntimeError(f"initialize() has to be called before the engine trains with {name}")
        return optimizer

    def lr_scheduler_step(self) -> float:
        """Advance the schedule by one step and return the new learning rate."""
        self.schedule_step += 1
        return self.current_lr()

    def current_lr(self) -> float:
        """Return the learning rate of the next optimizer step."""
        return learning_rate(self.optim, self.schedule_step)

    @abstractmethod
    def write_export(self, path: Path, is_writer: bool) -> None:
        """Write the live model as a Hugging Face folder.

        All ranks must run to the end, even if the writer fails: the others may wait in a collective.

        Raises:
            CheckpointError: the folder cannot be written; only the writing rank raises.
        """

    def export(self, path: Path) -> None:
        """Write a Hugging Face folder from the live model; rank 0 writes, all ranks must call.

        Raises:
            CheckpointError: the folder cannot be written; every rank raises.
        """
        context, problem = self.setup.context, ""
        try:
            self.write_export(path, context.rank == 0)
        except CheckpointError as error:
            problem = str(error)
        agree(problem, "", context.world_size)
