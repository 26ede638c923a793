"""Exchange of gradients and weights between data-parallel ranks while they compute.

megatron-core's ``DistributedDataParallel`` divides a chunk's parameters into buckets. With ``overlap_grad_reduce``, the
gradients of a bucket are reduced as soon as the last micro-batch has computed all of them. With
``overlap_param_gather``, the weights that a step has updated are gathered in the next forward pass, each bucket before
its first layer runs. Until then, a rank has only its own share of the new weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from rollcast_megatron.module import Stage

__all__ = ["complete_weights", "gather_before_use", "reduce_in_backward", "start_reductions"]


@contextmanager
def reduce_in_backward(runners: Sequence[Any], is_last: bool) -> Iterator[None]:
    """Reduce gradients in the backward pass of the last micro-batch that runs during the block.

    Args:
        runners: chunks of the stage, each inside ``DistributedDataParallel``.
        is_last: True if the optimizer steps after the block. Otherwise further gradients may be added, so that none are
            reduced.
    """
    config, pauses = runners[0].config, [runner.no_sync for runner in runners]
    if not is_last:
        with ExitStack() as stack:
            for pause in pauses:
                stack.enter_context(pause())
            yield
        return
    config.no_sync_func = pauses if len(pauses) > 1 else pauses[0]
    try:
        yield
    finally:
        config.no_sync_func = None


def start_reductions(runners: Sequence[Any]) -> None:
    """Start reducing the gradients that no backward pass has reduced; does nothing without ``overlap_grad_reduce``."""
    for group in _bucket_groups(runners):
        if group.ddp_config.overlap_grad_reduce and group.grad_reduce_handle is None:
            group.start_grad_sync()


def gather_before_use(runners: Sequence[Any], stage: Stage) -> None:
    """Make the chunks wait for weights that they read outside the forward pass of the weights' module."""
    chunks: Any = stage.chunks
    for runner, chunk in zip(runners, chunks, strict=True):
        chunk.await_weight = partial(_await_weight, runner)


def complete_weights(runners: Sequence[Any]) -> None:
    """Gather the weights that no forward pass has gathered since the last step; all data-parallel ranks must call."""
    for group in _bucket_groups(runners):
        is_complete = group.param_gather_dispatched and group.param_gather_handle is None
        if group.ddp_config.overlap_param_gather and not is_complete:
            group.start_param_sync(force_sync=True)


def _await_weight(runner: Any, weight: Tensor) -> None:
    group = runner.param_to_bucket_group.get(weight)
    if group is not None:
        group.finish_param_sync()


def _bucket_groups(runners: Sequence[Any]) -> Iterator[Any]:
    for runner in runners:
        if hasattr(runner, "ddp_config"):
            yield from runner.bucket_groups
            yield from runner.expert_parallel_bucket_groups
