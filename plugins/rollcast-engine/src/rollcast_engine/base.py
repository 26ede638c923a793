"""What training engines on torch do alike, whatever splits their model."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from rollcast.contracts.device import local_device
from rollcast.contracts.engine import BaseEngine, EngineSetup
from rollcast.errors import CheckpointError
from rollcast_engine.optim import check_optim, learning_rate
from rollcast_engine.process_group import agree

if TYPE_CHECKING:
    from rollcast.contracts.engine import OptimConfig

__all__ = ["TorchEngine"]

_Optimizer = TypeVar("_Optimizer")


class TorchEngine(BaseEngine):
    """Base of engines: the two modes, the schedule, and exports that fail on all ranks or on none.

    A subclass implements :meth:`mode` and :meth:`write_export`, and what is left of :class:`BaseEngine`.

    Attributes:
        device: where the model computes; the CPU before :meth:`use_local_device`.
        schedule_step: steps of the learning rate's schedule so far; part of a checkpoint.

    Raises:
        ConfigError: on construction, for a key of ``optim`` with a value that is not valid.
    """

    def __init__(self, setup: EngineSetup) -> None:
        super().__init__(setup)
        if setup.optim is not None:
            check_optim(setup.optim, f"{setup.section}.optim")
        self.device = torch.device("cpu")
        self.schedule_step = 0

    def use_local_device(self) -> None:
        """Compute on this rank's accelerator from now on, if the machine has one."""
        self.device = local_device(self.setup.context.local_rank)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    @abstractmethod
    def mode(self, training: bool) -> AbstractContextManager[None]:
        """Dropout on or off, and weights on the device, for the calls inside; gradients stay as they are."""

    @contextmanager
    def train_mode(self) -> Iterator[None]:
        """Dropout on, gradients on, weights on the device, for the calls inside."""
        with self.mode(training=True), torch.enable_grad():
            yield

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        """Dropout off and no gradient, for the calls inside.

        By ``no_grad``: weights gathered under ``inference_mode`` could not be trained afterwards.
        """
        with self.mode(training=False), torch.no_grad():
            yield

    @property
    def optim(self) -> OptimConfig:
        """The optimizer's keys.

        Raises:
            TypeError: the engine was built to infer only.
        """
        if self.setup.optim is None:
            raise TypeError("this engine was built without optim: it gives log-probs or values, and cannot train")
        return self.setup.optim

    def require_optimizer(self, optimizer: _Optimizer | None) -> _Optimizer:
        """The optimizer, which is there once the engine is initialized.

        Raises:
            TypeError: the engine was built to infer only.
            RuntimeError: it is not initialized.
        """
        name = self.optim.optimizer
        if optimizer is None:
            raise RuntimeError(f"initialize() has to be called before the engine trains with {name}")
        return optimizer

    def lr_scheduler_step(self) -> float:
        """Advance the schedule by one; gives the learning rate from now on."""
        self.schedule_step += 1
        return self.current_lr()

    def current_lr(self) -> float:
        """The learning rate that the next optimizer step uses."""
        return learning_rate(self.optim, self.schedule_step)

    @abstractmethod
    def write_export(self, path: Path, is_writer: bool) -> None:
        """Write the live model as a Hugging Face folder.

        All ranks go through it to its end, also when the writer fails: the others may wait in a collective.

        Raises:
            CheckpointError: on the writing rank, the folder cannot be written.
        """

    def export(self, path: Path) -> None:
        """Write a Hugging Face folder from the live model; rank 0 writes, all ranks take part.

        Raises:
            CheckpointError: on every rank, if the folder cannot be written.
        """
        context, problem = self.setup.context, ""
        try:
            self.write_export(path, context.rank == 0)
        except CheckpointError as error:
            problem = str(error)
        agree(problem, "", context.world_size)
