"""Attention over rows packed into one sequence, registered as an attention implementation of transformers.

Axes: ``H`` query heads, ``K`` key and value heads, ``N`` packed tokens, ``D`` dimensions of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from rollcast_engine.keys import EngineKeyError
from rollcast_fsdp.ulysses import all_heads, all_tokens, repeat_heads

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["PACKED", "PackedRows", "packed_attention", "plain_attention", "use_packed_attention"]

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
    """

    lengths: tuple[int, ...]
    bounds: Tensor
    group: Any = None


def use_packed_attention(module: Any, attention: str) -> None:
    """Make ``module``, a transformers model, use :func:`packed_attention` from now on.

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

    This uses torch's varlen kernel on CUDA in half precision, and otherwise one call per row.

    Args:
        module: the model's attention layer.
        query: ``[1, H, N, D]``; if the rows have a ``group``, only this rank's tokens.
        key, value: ``[1, K, N, D]``, where ``K`` divides ``H``.
        attention_mask: ignored; the rows determine which tokens attend to each other.
        packed_rows: row layout that the engine passes to the model.
        options: keyword arguments of other attention implementations.

    Returns:
        The output ``[1, N, H, D]``, and None for the attention weights.

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
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and dropout == 0.0 and _has_varlen():
        output = _varlen(query, key, value, packed_rows, scaling, sliding_window)
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


def _has_varlen() -> bool:
    return find_spec("torch.nn.attention.varlen") is not None


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, rows: PackedRows, scaling: float | None, window: int | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    longest = max(rows.lengths)
    attended: Any = varlen_attn(
        query[0].transpose(0, 1).contiguous(),
        key[0].transpose(0, 1).contiguous(),
        value[0].transpose(0, 1).contiguous(),
        rows.bounds,
        rows.bounds,
        longest,
        longest,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.size(1) != key.size(1),
    )
    output: Tensor = attended.unsqueeze(0)
    return output
