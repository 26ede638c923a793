"""Attention over rows packed into one sequence, registered as an attention implementation of transformers.

Axes: ``H`` query heads, ``K`` key and value heads, ``N`` packed tokens, ``D`` dimensions of a head.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from rollcast_engine.keys import EngineKeyError
from rollcast_fsdp.ulysses import all_heads, all_tokens, repeat_heads
from rollcast_fsdp.varlen import AttentionNeeds, VarlenKernel, find_kernel

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["PACKED", "PackedRows", "packed_attention", "plain_attention", "use_packed_attention"]

log = logging.getLogger(__name__)

#: Name of the implementation in transformers' registry, and therefore in a module's config.
PACKED = "rollcast_packed"
_PACKABLE = ("sdpa", "flash_attention_2", "flash_attention_3")


@dataclass(frozen=True)
class PackedRows:
    """Layout of the rows in a pack; passed to every layer's attention as ``packed_rows``.

    Attributes:
        lengths: tokens of each row, in order; their sum is ``N``.
        bounds: int32 ``[rows + 1]``, start of each row, and the end.
        group: ranks that hold a part of the tokens each (Ulysses); None if one rank holds them all.
        kernel: kernel for all rows at once; None for one SDPA call for each row.
    """

    lengths: tuple[int, ...]
    bounds: Tensor
    group: Any = None
    kernel: VarlenKernel | None = None


def use_packed_attention(module: Any, attention: str, device: torch.device, dtype: torch.dtype) -> VarlenKernel | None:
    """Make ``module``, a transformers model, use :func:`packed_attention` from now on.

    Args:
        module: the model.
        attention: ``model.attn_implementation``.
        device: device of the passes.
        dtype: dtype of the passes.

    Returns:
        The kernel for the model's packs; None for one SDPA call for each row, which is logged.

    Raises:
        EngineKeyError: the model bypasses transformers' attention registry, or ``attention`` does not support packs.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if attention not in _PACKABLE:
        raise EngineKeyError(
            "use_remove_padding",
            f"is true, but model.attn_implementation={attention} needs padded rows; use one of {', '.join(_PACKABLE)}",
        )
    ALL_ATTENTION_FUNCTIONS.register(PACKED, packed_attention)
    module.set_attn_implementation(PACKED)
    if module.config.get_text_config()._attn_implementation != PACKED:
        raise EngineKeyError(
            "use_remove_padding",
            f"is true, but {type(module).__name__} does not take its attention from transformers' registry; "
            "set it to false",
        )
    kernel, reasons = find_kernel(attention, device, _needs(module.config.get_text_config(), dtype))
    if kernel is not None:
        log.info("packed rows attend with %s", kernel.name)
    else:
        # On a CPU there is nothing better to install.
        level = logging.INFO if device.type == "cpu" else logging.WARNING
        log.log(level, "packed rows attend with one SDPA call for each row, which is slow: %s", "; ".join(reasons))
    return kernel


def _needs(config: Any, dtype: torch.dtype) -> AttentionNeeds:
    layers = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    heads = int(config.num_attention_heads)
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    if getattr(config, "qk_nope_head_dim", None):  # latent attention
        head_size = config.qk_nope_head_dim + config.qk_rope_head_dim
    return AttentionNeeds(
        dtype=dtype,
        window=window if layers is None else any("sliding" in layer for layer in layers),
        dropout=float(getattr(config, "attention_dropout", 0.0) or 0.0) > 0,
        head_size=int(head_size),
    )


@contextmanager
def plain_attention(module: Any, attention: str) -> Iterator[None]:
    """Switch a module from packed to plain attention during the block, for padded rows and KV caches."""
    if module.config.get_text_config()._attn_implementation != PACKED:
        yield
        return
    module.set_attn_implementation(attention)
    try:
        yield
    finally:
        module.set_attn_implementation(PACKED)


# Not traced by torch.compile: it would compile the layers anew for each number of rows.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    packed_rows: PackedRows | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention of each token within its row.

    This uses the rows' kernel, or without one a call of SDPA for each row.

    Args:
        module: the model's attention layer.
        query: ``[1, H, N, D]``; if the rows have a ``group``, only this rank's tokens.
        key, value: ``[1, K, N, D]``, where ``K`` divides ``H``; values may be narrower.
        attention_mask: ignored; the rows determine which tokens attend to each other.
        packed_rows: row layout that the engine passes to the model.
        options: keyword arguments of other attention implementations.

    Returns:
        The output ``[1, N, H, D]``, as wide as the values, and None for the attention weights.

    Raises:
        EngineKeyError: the model does not pass ``packed_rows`` on, or needs an option that is not supported.
    """
    if packed_rows is None:
        raise EngineKeyError(
            "use_remove_padding",
            f"is true, but {type(module).__name__} does not pass the model's keyword arguments on to attention, "
            "so rows cannot be packed; set it to false",
        )
    for name in ("softcap", "s_aux", "position_bias"):
        if options.get(name) is not None:
            raise EngineKeyError(
                "use_remove_padding",
                f"is true, but {type(module).__name__} needs {name}, which packed rows do not support; set it to false",
            )
    group = packed_rows.group
    if group is not None:
        ranks = dist.get_world_size(group)
        query = all_tokens(query, group)
        key, value = (all_tokens(repeat_heads(heads, ranks), group) for heads in (key, value))
    if packed_rows.kernel is not None:
        q, k, v = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
        longest = max(packed_rows.lengths)
        # Kernels need values as wide as queries; those of latent attention (DeepSeek) are narrower.
        width = v.size(-1)
        v = torch.nn.functional.pad(v, (0, q.size(-1) - width))
        output = packed_rows.kernel(q, k, v, packed_rows.bounds, longest, scaling, sliding_window, dropout)
        output = output[..., :width].unsqueeze(0)
    else:
        output = _row_by_row(query, key, value, packed_rows, scaling, dropout, sliding_window)
    return (output if group is None else all_heads(output, group)), None


def _row_by_row(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: PackedRows,
    scaling: float | None,
    dropout: float,
    window: int | None,
) -> Tensor:
    """Attend with one call per row, which avoids both a mask and work on pairs of tokens of different rows."""
    grouped = query.size(1) != key.size(1)
    parts = (torch.split(tensor, list(rows.lengths), dim=2) for tensor in (query, key, value))
    outputs = []
    for q, k, v in zip(*parts, strict=True):
        mask = _window_mask(q.size(2), window, q.device)
        attended = scaled_dot_product_attention(
            q, k, v, mask, dropout_p=dropout, scale=scaling, is_causal=mask is None, enable_gqa=grouped
        )
        outputs.append(attended.transpose(1, 2))
    return torch.cat(outputs, dim=1)


def _window_mask(length: int, window: int | None, device: torch.device) -> Tensor | None:
    if window is None or length <= window:
        return None
    distance = torch.arange(length, device=device).unsqueeze(1) - torch.arange(length, device=device)
    return (distance >= 0) & (distance < window)
