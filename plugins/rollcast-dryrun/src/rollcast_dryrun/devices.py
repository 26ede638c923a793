"""Runs of the table's cells on a real device, in the phases of their dry runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist

from rollcast_dryrun.cells import fsdp_cells, megatron_cells
from rollcast_dryrun.engines import EngineCell, own_groups, run_step

__all__ = ["cells_of_one_device", "run_on_device"]

#: Keys with the numbers of ranks that share something.
_RANKS = (
    *("fsdp_size", "ulysses_sequence_parallel_size", "tensor_model_parallel_size", "context_parallel_size"),
    *("pipeline_model_parallel_size", "expert_model_parallel_size"),
)


def cells_of_one_device() -> list[EngineCell]:
    """Return the cells of the engines that need one device, and those of more ranks that run alike on one."""
    cells = [*fsdp_cells(), *megatron_cells()]
    alone = [
        replace(cell, world=1, rank=0) for cell in cells if all(cell.keys.get(key, 1) in (1, -1) for key in _RANKS)
    ]
    return list({cell.name: cell for cell in alone}.values())


def run_on_device(cell: EngineCell) -> dict[str, dict[str, int]]:
    """Run a cell's step with random weights; return phase → ``peak_allocated`` and ``allocated`` in bytes.

    Raises:
        FloatingPointError: the gradient's norm is not finite.
    """
    phases = _DevicePhases()
    torch.cuda.empty_cache()
    try:
        with own_groups():
            run_step(replace(cell, model_keys={**cell.model_keys, "random_init": True}), phases)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return phases.bytes


class _DevicePhases:
    """The memory of each phase, as torch's allocator reports it."""

    def __init__(self) -> None:
        self.bytes: dict[str, dict[str, int]] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        torch.cuda.reset_peak_memory_stats()
        yield
        torch.cuda.synchronize()
        self.bytes[name] = {
            "peak_allocated": torch.cuda.max_memory_allocated(),
            "allocated": torch.cuda.memory_allocated(),
        }
