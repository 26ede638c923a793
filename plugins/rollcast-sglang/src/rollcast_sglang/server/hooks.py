"""Changes to SGLang, made through SGLang's own plugin interface."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rollcast_serving.stops import StopMatcher, StopStrings
from rollcast_sglang.environment import SERVER_VARIABLE, STOP_STRINGS
from rollcast_sglang.server_args import SAMPLING_BACKEND

__all__ = ["register"]


def register() -> None:
    """Register this package's changes, as entry point of ``sglang.srt.plugins``; does nothing unless rollcast
    started the server.
    """
    if SERVER_VARIABLE not in os.environ:
        return
    from sglang.srt.layers.sampler import register_sampler_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    register_sampler_backend(SAMPLING_BACKEND, _build_sampler)
    batch = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch"
    HookRegistry.register(batch, _give_seeds, HookType.AFTER)
    check = "sglang.srt.managers.schedule_batch.Req._check_token_based_finish"
    HookRegistry.register(check, _stop_at_stops, HookType.REPLACE)
    manager = "sglang.srt.lora.lora_manager.LoRAManager.__init__"
    HookRegistry.register(manager, _do_without_pinning, HookType.BEFORE)
    record = "sglang.srt.state_capturer.base.BaseHostCache.__init__"
    HookRegistry.register(record, _keep_record_unpinned, HookType.BEFORE)
    HookRegistry.register("sglang.srt.model_loader.loader._initialize_model", _tie_head, HookType.AFTER)
    adapter = "sglang.srt.lora.lora.LoRAAdapter.initialize_weights"
    HookRegistry.register(adapter, _read_adapter_files, HookType.BEFORE)


def _build_sampler() -> Any:
    from rollcast_sglang.server.sampler import RequestSampler

    return RequestSampler()


def _give_seeds(info: Any, _: type, batch: Any, *__: object, **___: object) -> Any:
    """Set each row's seed to its request's, which SGLang does only in its deterministic mode."""
    import torch

    seeds = [request.sampling_params.sampling_seed or 0 for request in batch.reqs]
    info.sampling_seed = torch.tensor(seeds, dtype=torch.int64).to(info.device, non_blocking=True)
    return info


def _stop_at_stops(request: Any, new_tokens: Sequence[int]) -> bool:
    """End a sequence only at its request's stop tokens, or at the token that completes a stop string.

    SGLang would add every end-of-sequence token of the model's folder, and with ``ignore_eos`` it would ignore the
    request's own stop tokens too.
    """
    from sglang.srt.managers.schedule_batch import FINISH_MATCHED_TOKEN

    stops = request.sampling_params.stop_token_ids or ()
    matcher = _matcher(request)
    for number, token in enumerate(new_tokens):
        completes = matcher is not None and matcher.add(token)
        if token in stops or completes:
            request.finished_reason = FINISH_MATCHED_TOKEN(matched=token)
            request.finished_len = len(request.output_ids) - len(new_tokens) + number + 1
            return True
    return False


def _matcher(request: Any) -> StopMatcher | None:
    """Return the matcher of a request's stop strings, which is kept from token to token."""
    texts = (request.sampling_params.custom_params or {}).get(STOP_STRINGS)
    if not texts:
        return None
    if not hasattr(request, "rollcast_matcher"):
        request.rollcast_matcher = _stop_strings().matcher(texts)
    matcher: StopMatcher | None = request.rollcast_matcher
    return matcher


@functools.cache
def _stop_strings() -> StopStrings:
    return StopStrings(*json.loads(os.environ[SERVER_VARIABLE]))


def _tie_head(model: Any, model_config: Any, *_: object, **__: object) -> Any:
    """Share the embedding with the vocabulary head if the config says so, which SGLang does not for Qwen3-MoE.

    The head would stay random, because a tied model's weights do not contain it.
    """
    if model_config.hf_text_config.tie_word_embeddings:
        embedding = getattr(getattr(model, "model", None), "embed_tokens", None)
        weight = getattr(embedding, "weight", None)
        if weight is not None and hasattr(getattr(model, "lm_head", None), "weight"):
            model.lm_head.weight = weight
    return model


def _do_without_pinning(*_: object, **__: object) -> None:
    """Make SGLang's LoRA code run on a machine without a GPU, where pinned memory is not available."""
    import torch

    if torch.accelerator.is_available():
        return
    import sglang.srt.lora.backend.torch_backend
    import sglang.srt.lora.layers

    torch.Tensor.pin_memory = _stay  # type: ignore[method-assign, assignment]
    for module in (sglang.srt.lora.layers, sglang.srt.lora.backend.torch_backend):
        module.torch = _TorchWithoutPinning()


def _keep_record_unpinned(*_: object, **__: object) -> None:
    """Make SGLang's record of the experts run on a machine without a GPU, where pinned memory is not available."""
    import torch

    if torch.accelerator.is_available():
        return
    from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

    ALLOC_MEMORY_FUNCS["cpu"] = _allocate_unpinned


def _allocate_unpinned(dims: tuple[int, ...], dtype: Any, device: str, **_: object) -> Any:
    import torch

    return torch.empty(dims, dtype=dtype, device=device)


def _read_adapter_files(adapter: Any) -> None:
    """Load an adapter's files even if the server started without weights; SGLang has one setting for both."""
    from sglang.srt.configs.load_config import LoadFormat

    if adapter.load_config.load_format == LoadFormat.DUMMY:
        adapter.load_config = dataclasses.replace(adapter.load_config, load_format=LoadFormat.AUTO)


def _stay(tensor: Any, *_: object) -> Any:
    return tensor


class _TorchWithoutPinning:
    """A view of ``torch`` whose factories ignore ``pin_memory``."""

    def __getattr__(self, name: str) -> Any:
        import torch

        dtype = getattr(torch, name)
        return partial(_make_unpinned, dtype) if name in {"tensor", "zeros", "empty", "ones"} else dtype


def _make_unpinned(factory: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return factory(*args, **{**kwargs, "pin_memory": False})
