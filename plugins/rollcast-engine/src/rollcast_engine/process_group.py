"""Joining the process group of a worker group."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from rollcast.contracts.device import collective_backend
from rollcast.contracts.rendezvous import serve_store
from rollcast.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from rollcast.contracts.worker import WorkerContext

__all__ = ["agree", "join_process_group"]

#: Equal to the timeout of torch's own rendezvous.
_STORE_TIMEOUT = timedelta(minutes=30)


def join_process_group(context: WorkerContext) -> None:
    """Join the other ranks of the group, unless another engine of this process has done so.

    Raises:
        ConfigError: this process belongs to a group of another size, or the group has no ``master_port``.
    """
    if dist.is_initialized():
        if dist.get_world_size() != context.world_size:
            raise ConfigError(
                f"this process already belongs to a torch process group of {dist.get_world_size()} ranks; "
                f"an engine of {context.world_size} ranks cannot be added to it"
            )
        return
    if context.world_size == 1:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(collective_backend(), store=store, rank=0, world_size=1)
        return
    if not context.master_port:
        raise ConfigError(f"group {context.group} has {context.world_size} ranks but no master_port to meet at")
    dist.init_process_group(
        collective_backend(), store=_meet(context), rank=context.rank, world_size=context.world_size
    )


def _meet(context: WorkerContext) -> Any:
    """Return the store of the group; rank 0 serves it, on its own address only."""
    if context.rank == 0:
        return serve_store(context.master_addr, context.master_port, _STORE_TIMEOUT, context.world_size)
    stores: Any = dist  # the stubs lack the stores
    return stores.TCPStore(
        context.master_addr, context.master_port, context.world_size, is_master=False, timeout=_STORE_TIMEOUT
    )


def agree(problem: str, what: str, ranks: int, group: dist.ProcessGroup | None = None) -> None:
    """Raise on every rank if one rank has a problem; waits for all ranks.

    Args:
        problem: problem of this rank; empty for none.
        what: prefix of the message; may be empty.
        ranks: number of ranks; 1 skips the collective.
        group: process group of these ranks; None for the default group.

    Raises:
        CheckpointError: a rank has a problem; the message is the first rank's.
    """
    problems: list[Any] = [problem]
    if ranks > 1:
        problems = [None] * ranks
        dist.all_gather_object(problems, problem, group=group)
    first = next((text for text in problems if text), None)
    if first:
        raise CheckpointError(f"{what}: {first}" if what else first)
