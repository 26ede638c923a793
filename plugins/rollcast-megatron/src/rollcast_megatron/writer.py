"""Writing shards in this process; megatron-core's own writer starts processes, which an actor must not do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import save

from rollcast_engine.shard_files import SummingWriter

__all__ = ["ShardWriter"]


class ShardWriter(SaveShardedStrategy):  # type: ignore[misc]
    """Writer of megatron-core's format ``torch_dist`` that uses PyTorch's writer.

    megatron-core calls :meth:`save`, which only keeps the shards; :meth:`write` writes them, also in another thread.

    Args:
        folder: folder of the shards.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__("torch_dist", 1)
        self._entries: Any = None
        self._writer = SummingWriter(folder)

    @property
    def can_handle_sharded_objects(self) -> bool:
        """True: entries need not be tensors."""
        return True

    @property
    def sums(self) -> dict[str, tuple[int, int]]:
        """Size in bytes and CRC-32 of each file that :meth:`write` has written, by name."""
        return self._writer.sums

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:  # as megatron-core calls it
        """Keep this rank's shards for :meth:`write`."""
        entries, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        self._entries = mcore_to_pyt_state_dict(entries, False)

    def write(self, group: dist.ProcessGroup | None = None) -> None:
        """Write this rank's shards; all ranks must call.

        Args:
            group: process group of all ranks that nothing else uses meanwhile; None for the default group.
        """
        planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        save(self._entries, storage_writer=self._writer, planner=planner, process_group=group)
        self._entries = None
