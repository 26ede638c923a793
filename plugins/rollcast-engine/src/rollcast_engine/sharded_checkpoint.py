"""Checkpoints of an engine's shards, the same for every engine of torch; an engine adds how its tensors are stored.

The folder::

    engine.json          summary: engine, model type, parameters, schedule; written last
    rng/rank_<r>.pt      random state of rank r (tensors and numbers only)
    shards/              the tensors, in the engine's own format
    sums/rank_<r>.json   sizes and checksums of the shards that rank r wrote
"""

from __future__ import annotations

import logging
import pickle
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from rollcast.errors import CheckpointError
from rollcast_engine.checkpoint_files import (
    SHARDS,
    check_shards,
    describe_failure,
    make_folder,
    read_rng,
    read_summary,
    require_fit,
    require_values,
    restore_saved_rng,
    rng_file,
    write_summary,
    write_sums,
)
from rollcast_engine.pending_save import PendingSave
from rollcast_engine.process_group import agree
from rollcast_engine.rng import capture_rng, derive_rng, restore_rng

if TYPE_CHECKING:
    from rollcast.contracts.engine import ModelType

__all__ = ["READ_ERRORS", "WRITE_ERRORS", "ShardedState", "load", "quiet", "save", "start_save"]

logger = logging.getLogger(__name__)
READ_ERRORS = (CheckpointException, OSError, ValueError, KeyError, RuntimeError, EOFError, pickle.UnpicklingError)
WRITE_ERRORS = (CheckpointException, OSError, RuntimeError)  # RuntimeError: torch's own writer on a full disk
#: Sizes and checksums by file name.
Sums = Mapping[str, Sequence[int]]


class ShardedState(ABC):
    """The state of an engine that a checkpoint holds; loading writes into the same tensors.

    Attributes:
        engine: name of the engine in ``engine.json``.
        values: types of the values that its summary has besides those of every engine.
        model_type, rank, world_size, schedule_step: as in the engine.
        trains: True if the engine has an optimizer.
    """

    engine: ClassVar[str]
    values: ClassVar[Mapping[str, type]] = {}
    model_type: ModelType
    rank: int
    world_size: int
    schedule_step: int
    trains: bool

    @abstractmethod
    def parameters(self) -> dict[str, list[Any]]:
        """Return shape and dtype of each saved tensor, as JSON values."""

    @abstractmethod
    def described_adapter(self) -> dict[str, Any] | None:
        """Return config and fingerprint of the base weights (``base``) of an adapter, as JSON; None without one."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return the values of the summary that only this engine has."""

    @abstractmethod
    def start_writing(
        self, folder: Path, in_background: bool, group: dist.ProcessGroup | None
    ) -> Callable[[], Sums | None]:
        """Start writing the tensors, and return a function that completes them; all ranks call both.

        Args:
            folder: folder of the shards.
            in_background: the function is called in a thread while training goes on, so tensors have to be copied.
            group: process group of all ranks on CPU for the thread; None for a single rank.

        Returns:
            A function that returns sizes and checksums of this rank's files; None to have them computed.
        """

    @abstractmethod
    def read(self, path: Path, summary: Mapping[str, Any]) -> None:
        """Read the tensors of a checked checkpoint, in place.

        Raises:
            CheckpointError: they cannot be read.
        """

    def check_files(self, folder: Path) -> None:  # noqa: B027  # most formats have no further files
        """Check further files among the shards; raises CheckpointError for a damaged one."""

    def is_same_layout(self, summary: Mapping[str, Any]) -> bool:
        """Return True if the checkpoint was written by ranks that hold the same parts of the model and the data."""
        return bool(summary["world_size"] == self.world_size)

    def describe_layout(self, summary: Mapping[str, Any]) -> str:
        """Return the ranks that a summary was written by, or this engine's, as text."""
        return f"{summary['world_size']} ranks"

    @property
    def random_stream(self) -> int:
        """Number from which random states are derived on another layout; equal on ranks that draw the same numbers."""
        return self.rank

    def capture_rng(self) -> dict[str, Any]:
        """Return the random state of the process, of tensors and numbers."""
        return capture_rng()

    def restore_rng(self, state: dict[str, Any]) -> None:
        """Restore the random state of :meth:`capture_rng`."""
        restore_rng(state)

    def summary(self) -> dict[str, Any]:
        """Return the content of ``engine.json``."""
        return {
            "model_type": self.model_type,
            "world_size": self.world_size,
            "schedule_step": self.schedule_step,
            "has_optimizer": self.trains,
            "parameters": self.parameters(),
            "adapter": self.described_adapter(),
            **self.describe(),
        }


def save(path: Path, state: ShardedState) -> None:
    """Write the folder; every rank must call.

    Raises:
        CheckpointError: a rank could not write its part; every rank raises.
    """
    complete = _start(path, state, False, None)
    _finish(path, state.engine, state.rank, state.world_size, complete, state.summary(), None)


def start_save(path: Path, state: ShardedState, group: dist.ProcessGroup | None) -> PendingSave:
    """Copy the state to host memory, and write the folder from there in a thread; every rank must call.

    Args:
        path: folder of the checkpoint.
        state: state to save; it may change again once this returns.
        group: process group of all ranks on CPU, not used by anything else meanwhile; None for a single rank.

    Raises:
        CheckpointError: a rank could not start writing; every rank raises.
    """
    complete = _start(path, state, True, group)
    engine, rank, ranks, summary = state.engine, state.rank, state.world_size, state.summary()
    return PendingSave(path, lambda: _finish(path, engine, rank, ranks, complete, summary, group))


def _start(
    path: Path, state: ShardedState, in_background: bool, group: dist.ProcessGroup | None
) -> Callable[[], Sums | None]:
    failed = f"checkpoint {path} could not be written"
    problem = ""
    try:
        make_folder(path, state.rank, state.capture_rng())
        (path / SHARDS).mkdir(exist_ok=True)
    except WRITE_ERRORS as error:
        problem = f"rank {state.rank}: {error}"
    agree(problem, failed, state.world_size)
    complete: Callable[[], Sums | None] = dict
    try:
        with quiet():
            complete = state.start_writing(path / SHARDS, in_background, group)
    except WRITE_ERRORS as error:
        problem = f"rank {state.rank}: {describe_failure(error)}"
    agree(problem, failed, state.world_size)
    return complete


def _finish(
    path: Path,
    engine: str,
    rank: int,
    ranks: int,
    complete: Callable[[], Sums | None],
    summary: dict[str, Any],
    group: dist.ProcessGroup | None,
) -> None:
    failed, problem = f"checkpoint {path} could not be written", ""
    try:
        with quiet():
            write_sums(path, rank, complete())
    except WRITE_ERRORS as error:
        problem = f"rank {rank}: {describe_failure(error)}"
    agree(problem, failed, ranks, group)
    if rank == 0:
        try:
            write_summary(path, engine, summary)
        except OSError as error:
            problem = f"rank 0: {error}"
    agree(problem, failed, ranks, group)


def load(path: Path, state: ShardedState) -> int:
    """Load the folder into the engine's tensors and this process's RNG, and return the step of the schedule.

    Nothing is changed unless the folder is complete, intact, and fits the engine.

    Raises:
        CheckpointError: it is not; every rank raises, and the message names what is missing, different or corrupt.
    """
    rng: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    problem = ""
    try:
        summary = read_summary(path, state.engine)
        require_values(path, summary, state.values)
        ours = {"model_type": state.model_type, "parameters": state.parameters()}
        require_fit(path, summary, ours, state.trains, _adapter_differences(summary, state))
        rng = _read_rng(path, state, state.is_same_layout(summary))
        check_shards(path, int(summary["world_size"]), state.rank, state.world_size)
        state.check_files(path / SHARDS)
    except CheckpointError as error:
        problem = str(error)
    agree(problem, "", state.world_size)
    with quiet():
        state.read(path, summary)
    restore_saved_rng(path, rng, state.restore_rng)
    if not state.is_same_layout(summary):
        logger.warning(
            "checkpoint %s was written by %s and is read by %s: random numbers are re-seeded from rank 0's state",
            path,
            state.describe_layout(summary),
            state.describe_layout(state.summary()),
        )
        derive_rng(state.random_stream)
    return int(summary["schedule_step"])


def _read_rng(path: Path, state: ShardedState, is_same_layout: bool) -> dict[str, Any]:
    """Return this rank's random state; rank 0's on another layout."""
    ranks = range(state.world_size) if is_same_layout else range(1)
    missing = [str(rng_file(path, rank)) for rank in ranks if not rng_file(path, rank).is_file()]
    if missing:
        raise CheckpointError(f"checkpoint {path} is incomplete: it lacks {', '.join(missing)}")
    return read_rng(rng_file(path, state.rank if is_same_layout else 0))


def _adapter_differences(summary: Mapping[str, Any], state: ShardedState) -> list[str]:
    theirs, ours = summary.get("adapter"), state.described_adapter()
    if (theirs is None) != (ours is None):
        whole, part = "the whole model", "a LoRA adapter"
        there, here = (part, whole) if ours is None else (whole, part)
        return [f"it contains {there}, but the engine trains {here} (model.lora_rank)"]
    bases = {adapter["base"] for adapter in (theirs, ours) if adapter is not None} - {None}
    return ["its adapter was trained on other base weights than those in model.path"] if len(bases) > 1 else []


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress torch's warnings about its own deprecated parts and about saving from a single process."""
    with warnings.catch_warnings():
        for message in (".*TypedStorage is deprecated.*", ".*single process.*", ".*is deprecated.*"):
            warnings.filterwarnings("ignore", message=message)
        yield
