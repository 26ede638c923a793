"""Running megatron-core on a machine without CUDA; this module does nothing if CUDA is available.

Some modules of megatron-core use ``torch.cuda.current_device()`` or ``device="cuda"`` for the process's device. In
those modules only, the name ``torch`` is replaced by a view in which these mean the CPU; torch itself is unchanged.
Random states that layers draw from are the CPU's. Code that checks a tensor's type name (``torch.cuda.FloatTensor``) is
called inside :func:`cuda_type_names`.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

__all__ = ["cuda_type_names", "install"]

#: Modules below ``megatron.core`` that an engine calls and that name CUDA.
MODULES = (
    "distributed.distributed_data_parallel",
    "distributed.param_and_grad_buffer",
    "models.common.embeddings.rotary_pos_embedding",
    "models.common.embeddings.yarn_rotary_pos_embedding",
    "optimizer.clip_grads",
    "optimizer.distrib_optimizer",
    "optimizer.optimizer",
    "pipeline_parallel.p2p_communication",
    "pipeline_parallel.schedules",
    "tensor_parallel.layers",
    "tensor_parallel.mappings",
    "tensor_parallel.random",
    "tensor_parallel.utils",
    "transformer.moe.router",
    "transformer.moe.token_dispatcher",
    "utils",
)
_FACTORIES = ("arange", "empty", "empty_like", "ones", "tensor", "zeros", "zeros_like")


class _View(ModuleType):
    """A view of a module with some names replaced."""

    def __init__(self, original: ModuleType, replaced: Mapping[str, Any]) -> None:
        super().__init__(original.__name__)
        self._original = original
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


class _CudaTypeNames(TorchFunctionMode):
    """Function mode in which CPU tensors report CUDA's type names and ``.cuda()`` does nothing."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.", 1)
        return result


def cuda_type_names() -> AbstractContextManager[Any]:
    """Return a context for calls that build a model or an optimizer; it does nothing if CUDA is available."""
    return nullcontext() if torch.cuda.is_available() else _CudaTypeNames()


@functools.cache
def install() -> None:
    """Prepare megatron-core for this process; does nothing if CUDA is available or on repeated calls."""
    if torch.cuda.is_available():
        return
    view = _cpu_view()
    for name in MODULES:
        module: Any = importlib.import_module(f"megatron.core.{name}")
        module.torch = view
    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    random._get_cuda_rng_state = _get_rng_state
    random._set_cuda_rng_state = _set_rng_state
    mappings: Any = importlib.import_module("megatron.core.tensor_parallel.mappings")
    mappings._gather_along_first_dim = _gather_uneven(mappings._gather_along_first_dim)
    mappings._reduce_scatter_along_first_dim = _reduce_scatter_uneven(mappings._reduce_scatter_along_first_dim)
    dispatcher: Any = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    dispatcher.MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = _list_splits
    for name in ("rotary_pos_embedding", "yarn_rotary_pos_embedding"):
        rotary: Any = importlib.import_module(f"megatron.core.models.common.embeddings.{name}")
        rotary.get_pos_emb_on_this_cp_rank = _context_part
    # On the CPU the tracked state is the process's own, which megatron-core's tracker warns about.
    logging.getLogger(random.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())


def _cpu_view() -> ModuleType:
    cuda = _View(
        torch.cuda,
        {
            "Stream": lambda *_: None,
            "current_device": lambda: torch.device("cpu"),
            "get_rng_state": lambda *_: torch.get_rng_state(),
            "manual_seed": torch.manual_seed,
            "synchronize": lambda *_: None,
        },
    )
    factories = {name: _on_cpu(getattr(torch, name)) for name in _FACTORIES}
    return _View(torch, {"cuda": cuda, **factories})


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = torch.device("cpu")
        return factory(*args, **kwargs)

    return make


def _gather_uneven(gather: Callable[..., Any]) -> Callable[..., Any]:
    """Return a gather that also takes parts of unequal sizes, which gloo does not: it pads them."""

    @functools.wraps(gather)
    def call(part: torch.Tensor, group: Any, sizes: Sequence[int] | None = None, *options: Any, **named: Any) -> Any:
        if sizes is None or dist.get_world_size(group) == 1:
            return gather(part, group, sizes, *options, **named)
        padded = part.new_zeros((max(sizes), *part.shape[1:]))
        padded[: len(part)] = part
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([whole[:size] for whole, size in zip(parts, sizes, strict=True)])

    return call


def _reduce_scatter_uneven(scatter: Callable[..., Any]) -> Callable[..., Any]:
    """Return a reduce-scatter that also takes parts of unequal sizes, which gloo does not: it sums the whole."""

    @functools.wraps(scatter)
    def call(whole: torch.Tensor, group: Any, sizes: Sequence[int] | None = None, *options: Any, **named: Any) -> Any:
        if sizes is None or dist.get_world_size(group) == 1:
            return scatter(whole, group, sizes, *options, **named)
        total = whole.clone()
        dist.all_reduce(total, group=group)
        return torch.split(total, list(sizes))[dist.get_rank(group)].contiguous()

    return call


def _list_splits(dispatcher: Any, _point: str, tokens_per_expert: torch.Tensor) -> torch.Tensor:
    """Make lists of the sizes that all-to-all takes as lists: megatron-core makes them as it copies from the device."""
    for name in ("input_splits", "output_splits"):
        splits = getattr(dispatcher, name)
        if isinstance(splits, torch.Tensor):
            setattr(dispatcher, name, splits.tolist())
    return tokens_per_expert


def _context_part(pos_emb: torch.Tensor, seq_dim: int, cp_group: Any) -> torch.Tensor:
    """Return this context-parallel rank's two chunks of position embeddings.

    megatron-core's function selects them with an index in pinned memory, which needs an accelerator.
    """
    ranks, rank = cp_group.size(), cp_group.rank()
    chunks = pos_emb.chunk(2 * ranks, seq_dim)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]], seq_dim)


def _get_rng_state(*_: Any, **__: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, *_: Any, **__: Any) -> None:
    torch.set_rng_state(new_state)
