"""What this package changes in SGLang, through SGLang's own plugin interface."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from rollcast_sglang.environment import SERVER_VARIABLE
from rollcast_sglang.server_args import SAMPLING_BACKEND

__all__ = ["register"]


def register() -> None:
    """Entry point ``sglang.srt.plugins``; does nothing in a server that no rollout started."""
    if SERVER_VARIABLE not in os.environ:
        return
    from sglang.srt.layers.sampler import register_sampler_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    register_sampler_backend(SAMPLING_BACKEND, _build_sampler)
    batch = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch"
    HookRegistry.register(batch, _give_seeds, HookType.AFTER)
    check = "sglang.srt.managers.schedule_batch.Req._check_token_based_finish"
    HookRegistry.register(check, _stop_at_stop_tokens, HookType.REPLACE)


def _build_sampler() -> Any:
    from rollcast_sglang.server.sampler import RequestSampler

    return RequestSampler()


def _give_seeds(info: Any, _: type, batch: Any, *__: object, **___: object) -> Any:
    """Give each row its request's seed, which SGLang does in its deterministic mode only."""
    import torch

    seeds = [request.sampling_params.sampling_seed or 0 for request in batch.reqs]
    info.sampling_seed = torch.tensor(seeds, dtype=torch.int64).to(info.device, non_blocking=True)
    return info


def _stop_at_stop_tokens(request: Any, new_tokens: Sequence[int]) -> bool:
    """End a sequence at its request's stop tokens and at nothing else.

    SGLang would add whatever the model's folder calls an end of sequence, and with ``ignore_eos`` ignore the
    request's own stop tokens too.
    """
    from sglang.srt.managers.schedule_batch import FINISH_MATCHED_TOKEN

    stops = request.sampling_params.stop_token_ids or ()
    for number, token in enumerate(new_tokens):
        if token in stops:
            request.finished_reason = FINISH_MATCHED_TOKEN(matched=token)
            request.finished_len = len(request.output_ids) - len(new_tokens) + number + 1
            return True
    return False
