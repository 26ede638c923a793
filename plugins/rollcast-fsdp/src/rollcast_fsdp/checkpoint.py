"""Checkpoints whose tensors torch.distributed.checkpoint stores; see :mod:`rollcast_engine.sharded_checkpoint`.

The shards hold ``model.<name>`` and ``optim.<name>.<entry>``. With an adapter only the trained tensors are saved. A
checkpoint may be loaded on another number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from rollcast.errors import CheckpointError
from rollcast_engine.checkpoint_files import SHARDS, describe_failure
from rollcast_engine.optim import prime_optimizer
from rollcast_engine.shard_files import CheckedReader, SummingWriter
from rollcast_engine.sharded_checkpoint import READ_ERRORS, ShardedState, Sums, quiet

if TYPE_CHECKING:
    from torch import Tensor

    from rollcast.contracts.engine import ModelType
    from rollcast_engine.lora import Adapter

__all__ = ["EngineState", "read_tensors"]


@dataclass(frozen=True)
class EngineState(ShardedState):
    """State of an engine to save; loading writes into the same tensors.

    Attributes:
        model_type, rank, world_size, schedule_step: as in the engine.
        distributed: True if the tensors are sharded over the ranks' process group.
        tensors: parameters and buffers by name, each once; with an adapter only the trained ones.
        optimizer: the optimizer; None for an engine that does not train.
        adapter: adapter inside the model; None without one.
    """

    engine: ClassVar[str] = "fsdp"
    values: ClassVar[Mapping[str, type]] = {"optimizer_state": list}
    model_type: ModelType
    rank: int
    world_size: int
    distributed: bool
    tensors: dict[str, Tensor]
    optimizer: torch.optim.Optimizer | None
    schedule_step: int
    adapter: Adapter | None = None

    @property
    def trains(self) -> bool:  # type: ignore[override]
        return self.optimizer is not None

    def state_dict(self) -> dict[str, Any]:
        """Return nested dicts with the engine's own tensors only."""
        state: dict[str, Any] = {"model": {name: tensor.detach() for name, tensor in self.tensors.items()}}
        moments = self.moments()
        return {**state, "optim": moments} if moments else state

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """Return the optimizer's state by parameter; empty before it has state."""
        states = {} if self.optimizer is None else self.optimizer.state
        optimizer_states = {
            name: {key: value for key, value in states[tensor].items() if isinstance(value, torch.Tensor)}
            for name, tensor in self.tensors.items()
            if tensor in states
        }
        return {name: moments for name, moments in optimizer_states.items() if moments}

    def entries(self) -> list[str]:
        """Return the names of the tensors that the optimizer keeps for a parameter."""
        return sorted({key for moments in self.moments().values() for key in moments})

    def parameters(self) -> dict[str, list[Any]]:
        return {name: [list(t.shape), str(t.dtype).removeprefix("torch.")] for name, t in self.tensors.items()}

    def described_adapter(self) -> dict[str, Any] | None:
        if self.adapter is None:
            return None
        pairs = {name: [pair.a, pair.b, pair.scaling] for name, pair in self.adapter.pairs.items()}
        return {"config": self.adapter.config, "base": self.adapter.base_fingerprint, "pairs": pairs}

    def describe(self) -> dict[str, Any]:
        return {"optimizer_state": self.entries()}

    def start_writing(
        self, folder: Path, in_background: bool, group: dist.ProcessGroup | None
    ) -> Callable[[], Sums | None]:
        writer, no_dist = SummingWriter(folder), not self.distributed
        if in_background:
            shards: Any = dcp.async_save(  # type: ignore[attr-defined]
                self.state_dict(), storage_writer=writer, process_group=group, no_dist=no_dist
            )

            def complete() -> Sums:
                shards.result()
                return writer.sums

            return complete
        dcp.save(self.state_dict(), storage_writer=writer, no_dist=no_dist)  # type: ignore[attr-defined]
        return lambda: writer.sums

    def read(self, path: Path, summary: Mapping[str, Any]) -> None:
        if self.optimizer is not None and summary["optimizer_state"]:
            prime_optimizer(self.optimizer)
            if self.entries() != summary["optimizer_state"]:
                raise CheckpointError(
                    f"checkpoint {path} has another optimizer: it has {', '.join(summary['optimizer_state'])} for each "
                    f"parameter, but optim.optimizer needs {', '.join(self.entries()) or 'nothing'}"
                )
        _load(path, self.state_dict(), not self.distributed)


def read_tensors(path: Path, names: Mapping[str, tuple[Any, str]]) -> dict[str, Tensor]:
    """Return some of the model's tensors, whole and in host memory, read in one process.

    Args:
        path: folder of the checkpoint.
        names: tensor names with shape and dtype, as under ``parameters`` in the checkpoint's summary.

    Raises:
        CheckpointError: they cannot be read.
    """
    tensors = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, (shape, dtype) in names.items()}
    with quiet():
        _load(path, {"model": tensors}, True)
    return tensors


def _load(path: Path, state: dict[str, Any], no_dist: bool) -> None:
    try:
        dcp.load(state, storage_reader=CheckedReader(path / SHARDS), no_dist=no_dist)  # type: ignore[attr-defined]
    except READ_ERRORS as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {describe_failure(error)}") from error
