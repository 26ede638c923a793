"""Meeting the other ranks of a worker group."""

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

#: As long as torch's own rendezvous waits for a rank.
_STORE_TIMEOUT = timedelta(minutes=30)


def join_process_group(context: WorkerContext) -> None:
    """Meet the other ranks of the group, unless another engine of this process did so already.

    Raises:
        ConfigError: this process belongs to a group of another size, or there is no port to meet at.
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
    """Return the store of the group, which rank 0 serves on its own address only."""
    if context.rank == 0:
        return serve_store(context.master_addr, context.master_port, _STORE_TIMEOUT, context.world_size)
    stores: Any = dist  # the stubs lack the stores
    return stores.TCPStore(
        context.master_addr, context.master_port, context.world_size, is_master=False, timeout=_STORE_TIMEOUT
    )


def agree(problem: str, what: str, ranks: int, group: dist.ProcessGroup | None = None) -> None:
    """Fail on every rank if one did, and on none before all have come this far.

    Args:
        problem: this rank's; empty for none.
        what: goes before it in the message; may be empty.
        ranks: how many there are; 1 asks nobody.
        group: of all of them; None for the process group of the training.

    Raises:
        CheckpointError: the first rank's problem.
    """
    problems: list[Any] = [problem]
    if ranks > 1:
        problems = [None] * ranks
        dist.all_gather_object(problems, problem, group=group)
    first = next((found for found in problems if found), None)
    if first:
        raise CheckpointError(f"{what}: {first}" if what else first)
