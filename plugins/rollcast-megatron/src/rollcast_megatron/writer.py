"""Writing shards in this process; megatron-core's own writer starts processes, which an actor must not do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

__all__ = ["ShardWriter"]


class ShardWriter(SaveShardedStrategy):  # type: ignore[misc]
    """Writer of megatron-core's format ``torch_dist`` that uses PyTorch's writer."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

    @property
    def can_handle_sharded_objects(self) -> bool:
        """True: entries need not be tensors."""
        return True

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Write this rank's shards; all ranks must call."""
        entries, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        writer = FileSystemWriter(checkpoint_dir)
        save(mcore_to_pyt_state_dict(entries, False), storage_writer=writer, planner=planner)
