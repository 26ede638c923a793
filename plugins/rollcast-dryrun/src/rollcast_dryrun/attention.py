"""The kernels that attention takes on a device; a build of torch for the CPU knows only the plain computation."""

from __future__ import annotations

import torch

__all__ = ["attend"]

aten = torch.ops.aten
_plain = torch.nn.functional.scaled_dot_product_attention
#: Largest size of a head that FlashAttention takes.
_LARGEST_HEAD = 256


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Compute ``torch.nn.functional.scaled_dot_product_attention`` as a CUDA device does.

    It takes FlashAttention if it can, and else the memory-efficient kernel.
    """
    if query.device.type != "cuda":
        return _plain(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is None and query.element_size() == 2 and query.size(-1) == value.size(-1) <= _LARGEST_HEAD:
        flash = aten._scaled_dot_product_flash_attention
        mixed: torch.Tensor = flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        return mixed
    if enable_gqa:
        groups = query.size(-3) // key.size(-3)
        key, value = (tensor.repeat_interleave(groups, -3) for tensor in (key, value))
    bias = attn_mask
    if bias is not None:
        if bias.dtype is torch.bool:
            bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill_(bias.logical_not(), -torch.inf)
        bias = bias.expand(*query.shape[:-2], query.size(-2), key.size(-2))
    keeps = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    efficient = aten._scaled_dot_product_efficient_attention
    result: torch.Tensor = efficient(query, key, value, bias, keeps, dropout_p, is_causal, scale=scale)[0]
    return result
