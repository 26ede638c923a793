"""The compiled part of Transformer Engine, ``transformer_engine_torch``: kernels that return without computing.

Each takes the arguments of the compiled function, allocates what that one returns, and notes what it reads and writes.
The shapes are those of Transformer Engine 2.11's sources in C++. Kernels for 8 bits and less are not there.

Axes: ``t`` tokens, ``b`` rows, ``s`` positions, ``h`` heads, ``d`` size of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import Enum, IntEnum
from functools import partial
from typing import Any, NoReturn

import torch

from rollcast.errors import CapabilityError
from rollcast_dryrun.mode import active_mode

Tensor = torch.Tensor

#: Largest size of a head that cuDNN's attention takes, on devices before Hopper and since.
_LARGEST_HEADS = (128, 256)
_HOPPER = (9, 0)


class DType(Enum):
    """Types of elements, by the library's names."""

    kByte = torch.uint8
    kInt32 = torch.int32
    kInt64 = torch.int64
    kFloat32 = torch.float32
    kFloat16 = torch.float16
    kBFloat16 = torch.bfloat16
    kFloat8E4M3 = torch.float8_e4m3fn
    kFloat8E5M2 = torch.float8_e5m2
    kFloat4E2M1 = torch.float4_e2m1fn_x2


class NVTE_Fused_Attn_Backend(IntEnum):
    """Implementations of attention in cuDNN."""

    NVTE_No_Backend = -1
    NVTE_F16_max512_seqlen = 0
    NVTE_F16_arbitrary_seqlen = 1
    NVTE_FP8 = 2


class _Names(type):
    """A class whose attributes are their own names, such as an enumeration that is passed on."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Names(name, (), {}) if name[0].isupper() else _missing(name)


def _missing(name: str) -> Callable[..., NoReturn]:
    def fail(*_: Any, **__: Any) -> NoReturn:
        raise CapabilityError(f"a dry run has no stand-in for Transformer Engine's kernel {name}")

    return fail


def _launch(name: str, reads: Sequence[Tensor | None], writes: Sequence[Tensor | None], flops: float = 0.0) -> None:
    read, written = ([tensor for tensor in tensors if tensor is not None] for tensors in (reads, writes))
    active_mode().note_kernel(name, read, written, flops)


# -- properties of the libraries and of the device -------------------------------------------------


def get_cudnn_version() -> int:
    """Return the version of cuDNN, 9.14."""
    return 91400


def get_cublasLt_version() -> int:
    """Return the version of cuBLAS, 12.9."""
    return 120900


def get_num_cublas_streams() -> int:
    """Return the number of streams that grouped products are spread over."""
    return 4


def get_fused_attn_backend(
    is_training: bool,
    q_dtype: DType,
    kv_dtype: DType,
    qkv_layout: str,
    bias_type: str,
    attn_mask_type: str,
    softmax_type: str,
    p_dropout: float,
    num_attn_heads: int,
    num_gqa_groups: int,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    head_dim_qk: int,
    head_dim_v: int,
    *_: Any,
) -> NVTE_Fused_Attn_Backend:
    """Return cuDNN's attention for 16 bits if it can compute this, else none."""
    is_new = torch.cuda.get_device_capability() >= _HOPPER
    largest = _LARGEST_HEADS[is_new]
    takes = (
        q_dtype in (DType.kBFloat16, DType.kFloat16)
        and bias_type == "NVTE_NO_BIAS"
        and all(size % 8 == 0 and size <= largest for size in (head_dim_qk, head_dim_v))
        and (is_new or "THD" not in qkv_layout)
    )
    backends = NVTE_Fused_Attn_Backend
    return backends.NVTE_F16_arbitrary_seqlen if takes else backends.NVTE_No_Backend


# -- products --------------------------------------------------------------------------------------


def _product(a: Tensor, transa: bool, b: Tensor, transb: bool) -> tuple[list[int], float]:
    """Return the shape of a product in the order of cuBLAS, and its arithmetic."""
    rows, columns = a[..., 0].numel(), a.size(-1)
    inner = columns if transa else rows
    if inner != (b[..., 0].numel() if transb else b.size(-1)):
        raise RuntimeError(f"matrices {list(a.shape)} ({transa}) and {list(b.shape)} ({transb}) have no product")
    outer = [b.size(-1)] if transb else list(b.shape[:-1])
    shape = [*outer, rows if transa else columns]
    return shape, 2.0 * math.prod(shape) * inner


def generic_gemm(
    a: Tensor,
    transa: bool,
    b: Tensor,
    transb: bool,
    out: Tensor | None,
    quantizer: None,
    out_dtype: DType | None,
    bias: Tensor | None,
    bias_type: DType,
    gelu: bool,
    gelu_in: None,
    grad: bool,
    workspace: Tensor,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    comm_overlap: None = None,
    extra_output: Tensor | None = None,
    **_: Any,
) -> list[Tensor | None]:
    """Multiply two matrices; with ``grad``, sum the second one's columns for the bias's gradient."""
    if quantizer is not None or gelu or comm_overlap is not None:
        raise CapabilityError("a dry run has no stand-in for Transformer Engine's products in 8 bits, or with overlap")
    shape, flops = _product(a, transa, b, transb)
    if out is None:
        out = torch.empty(shape, dtype=a.dtype if out_dtype is None else out_dtype.value, device=a.device)
    elif out.numel() != math.prod(shape):
        raise RuntimeError(f"a product of shape {shape} does not fit into {list(out.shape)}")
    bias_grad = torch.empty(b.size(-1), dtype=out.dtype, device=a.device) if grad and bias is not None else None
    _launch("generic_gemm", [a, b, bias, out if accumulate else None], [out, bias_grad, workspace], flops)
    return [out, bias_grad, None, extra_output]


def te_general_grouped_gemm(
    a: list[Tensor],
    transa: bool,
    b: list[Tensor],
    transb: bool,
    out: list[Tensor],
    out_dtype: DType,
    m_splits: list[int],
    bias: list[Tensor],
    bias_type: DType,
    single_output: bool,
    pre_gelu_out: list[Tensor],
    grad: bool,
    workspace: list[Tensor],
    workspace_size: int,
    accumulate: bool,
    *_: Any,
) -> list[Tensor]:
    """Multiply matrices in pairs, into one tensor or into one each."""
    products = [_product(one, transa, other, transb) for one, other in zip(a, b, strict=True)]
    size = sum(math.prod(shape) for shape, _ in products)
    if size != sum(tensor.numel() for tensor in (out[:1] if single_output else out)):
        raise RuntimeError("the results of grouped products do not fit into their tensors")
    before = out if accumulate else []
    gradients = bias if grad else []
    reads = [*a, *b, *before, *([] if grad else bias)]
    _launch("te_general_grouped_gemm", reads, [*out, *gradients, *workspace], sum(flops for _, flops in products))
    return bias


# -- norms and rotary embeddings -------------------------------------------------------------------

# The library puts these into a table with those of the norm that models have.
layernorm_fwd, layernorm_bwd = _missing("layernorm_fwd"), _missing("layernorm_bwd")


def rmsnorm_fwd(
    inputs: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor | None,
    quantizer: None,
    out_dtype: DType,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Tensor | None]:
    """Return the normalized vectors, None, and their scales ``[vectors]``."""
    if quantizer is not None:
        raise CapabilityError("a dry run has no stand-in for Transformer Engine's norms in 8 bits")
    if out is None:
        out = torch.empty(inputs.shape, dtype=out_dtype.value, device=inputs.device)
    scales = torch.empty(inputs[..., 0].numel(), dtype=torch.float32, device=inputs.device)
    _launch("rmsnorm_fwd", [inputs, weight], [out, scales])
    return [out, None, scales]


def rmsnorm_bwd(
    grad: Tensor,
    inputs: Tensor,
    scales: Tensor,
    weight: Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Tensor]:
    """Return the gradients of the vectors and of the weight."""
    gradients = [torch.empty_like(inputs), torch.empty_like(weight)]
    _launch("rmsnorm_bwd", [grad, inputs, scales, weight], gradients)
    return gradients


def _rotate(
    name: str,
    inputs: Tensor,
    freqs: Tensor,
    start_positions: Tensor | None,
    qkv_format: str,
    interleaved: bool,
    cu_seqlens: Tensor | None,
    *_: Any,
) -> Tensor:
    """Return rotated queries or keys, or their gradient."""
    is_packed = qkv_format == "NVTE_THD"
    if freqs.dim() != 4 or freqs.dtype != torch.float32 or inputs.dim() != (3 if is_packed else 4):
        raise RuntimeError(f"{name} takes no {list(inputs.shape)} with frequencies {list(freqs.shape)}, {freqs.dtype}")
    if is_packed and cu_seqlens is None:
        raise RuntimeError(f"{name} needs the lengths of packed rows")
    rotated = torch.empty(inputs.shape, dtype=inputs.dtype, device=inputs.device)
    _launch(name, [inputs, freqs, start_positions, cu_seqlens], [rotated])
    return rotated


fused_rope_forward, fused_rope_backward = (partial(_rotate, f"fused_rope_{way}") for way in ("forward", "backward"))


# -- attention -------------------------------------------------------------------------------------


def fused_attn_fwd(
    max_seqlen_q: int,
    max_seqlen_kv: int,
    is_training: bool,
    attn_scale: float,
    p_dropout: float,
    set_zero: bool,
    qkv_layout: str,
    bias_type: str,
    attn_mask_type: str,
    softmax_type: str,
    window_size: Sequence[int],
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *more: Any,
) -> list[Tensor]:
    """Return the mixed values, the logarithms of the softmax's sums, and the state of the random numbers."""
    device = query.device
    mixed = torch.empty([*query.shape[:-1], value.size(-1)], dtype=query.dtype, device=device)
    heads = query.size(-2)
    if "THD" in qkv_layout.split("_")[1]:
        mixed.zero_()
        sums = torch.empty(query.size(0), heads, 1, dtype=torch.float32, device=device)
    else:
        rows = cu_seqlens_q.numel() - 1
        sums = torch.empty(rows, heads, max_seqlen_q, 1, dtype=torch.float32, device=device)
    random = torch.empty(2, dtype=torch.int64, device=device)
    lengths = [cu_seqlens_q, cu_seqlens_kv, *_tensors(more)]
    flops = _attention_flops(query, value, max_seqlen_kv, attn_mask_type)
    _launch("fused_attn_fwd", [query, key, value, *lengths], [mixed, sums, random], flops)
    return [mixed, sums, random]


def fused_attn_bwd(
    max_seqlen_q: int,
    max_seqlen_kv: int,
    attn_scale: float,
    p_dropout: float,
    set_zero: bool,
    qkv_layout: str,
    bias_type: str,
    attn_mask_type: str,
    softmax_type: str,
    window_size: Sequence[int],
    deterministic: bool,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mixed: Tensor,
    grad: Tensor,
    fake_dtype: torch.dtype,
    dqkv_dtype: DType,
    saved: Sequence[Tensor],
    *more: Any,
) -> list[Tensor | None]:
    """Return the gradients of queries, keys and values, and None for a bias and for the softmax's offset."""
    if any(count in qkv_layout for count in "23"):
        raise CapabilityError(f"a dry run has no stand-in for attention of the layout {qkv_layout}")
    gradients = [
        torch.empty(tensor.shape, dtype=dqkv_dtype.value, device=tensor.device) for tensor in (query, key, value)
    ]
    if "THD" in qkv_layout.split("_")[1]:
        for gradient in gradients:
            gradient.zero_()
    lengths = [cu_seqlens_q, cu_seqlens_kv, *_tensors(more)]
    flops = 2.5 * _attention_flops(query, value, max_seqlen_kv, attn_mask_type)  # five products for two
    _launch("fused_attn_bwd", [query, key, value, mixed, grad, *saved, *lengths], gradients, flops)
    return [*gradients, None, None]


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    return [value for value in values if isinstance(value, torch.Tensor)]


def _attention_flops(query: Tensor, value: Tensor, keys: int, mask: str) -> float:
    """Return the arithmetic of two products of each query with ``keys`` keys, of which a causal mask hides half."""
    sizes = query.size(-1) + value.size(-1)
    return 2.0 * query[..., 0].numel() * keys * sizes * (0.5 if "CAUSAL" in mask else 1.0)


# -- packed rows that ranks share ------------------------------------------------------------------


def thd_read_half_tensor(tensor: Tensor, cu_seqlens: Tensor, half: int) -> Tensor:
    """Return a half of each row of ``[t, h, d]`` or ``[2, t, h, d]``."""
    shape = list(tensor.shape)
    shape[-3] //= 2
    part = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
    _launch("thd_read_half_tensor", [tensor, cu_seqlens], [part])
    return part


def thd_read_second_half_lse(sums: Tensor, cu_seqlens: Tensor, lse_packed: bool, length: int) -> Tensor:
    """Return the second halves of the softmax's sums."""
    part = torch.zeros([*sums.shape[:-1], length], dtype=sums.dtype, device=sums.device)
    _launch("thd_read_second_half_lse", [sums, cu_seqlens], [part])
    return part


def thd_second_half_lse_correction(sums: Tensor, step: Tensor, cu_seqlens: Tensor, lse_packed: bool) -> None:
    """Add a step's sums to the second halves."""
    _launch("thd_second_half_lse_correction", [step, cu_seqlens], [sums])


def thd_out_correction(out: Tensor, step: Tensor, sums: Tensor, step_sums: Tensor, cu_seqlens: Tensor, *_: Any) -> None:
    """Add a step's mixed values."""
    _launch("thd_out_correction", [step, sums, step_sums, cu_seqlens], [out])


def thd_grad_correction(grad: Tensor, step: Tensor, cu_seqlens: Tensor, *_: Any) -> None:
    """Add a step's gradients."""
    _launch("thd_grad_correction", [step, cu_seqlens], [grad])


# -- many tensors at once --------------------------------------------------------------------------


def multi_tensor_scale(chunk_size: int, noop_flag: Tensor, lists: list[list[Tensor]], scale: float) -> None:
    """Write the first list times ``scale`` to the second."""
    sources, targets = lists
    _launch("multi_tensor_scale", sources, [*targets, noop_flag])


def multi_tensor_l2norm(
    chunk_size: int,
    noop_flag: Tensor,
    lists: list[list[Tensor]],
    per_tensor: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the norm of all tensors ``[1]``, and those of each if asked for."""
    (tensors,) = lists
    device = tensors[0].device
    parts = torch.zeros(320, dtype=torch.float32, device=device)
    norm = torch.empty(1, dtype=torch.float32, device=device)
    norms = torch.empty(len(tensors) if per_tensor else 0, dtype=torch.float32, device=device)
    _launch("multi_tensor_l2norm", [*tensors, noop_flag], [parts, norm, norms])
    return norm, norms


def multi_tensor_adam(chunk_size: int, noop_flag: Tensor, lists: list[list[Tensor]], *_: Any) -> None:
    """Update parameters, the second list, by the gradients, the first; the others are the optimizer's state."""
    gradients, *updated = lists
    _launch("multi_tensor_adam", [*gradients, noop_flag], [tensor for tensors in updated for tensor in tensors])
