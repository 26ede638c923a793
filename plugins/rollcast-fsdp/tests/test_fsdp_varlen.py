"""Attention kernels of packed rows: each library's call by its own signature, or a message.

The stubs have the signatures of the releases that are named, and compute the attention themselves.
"""

from __future__ import annotations

import inspect
import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import fsdp_scenarios as scenarios
import pytest
import torch
from torch import Tensor, nn

from rollcast.errors import ConfigError
from rollcast_fsdp.attention import PackedRows, packed_attention, use_packed_attention
from rollcast_fsdp.varlen import AttentionNeeds, find_kernel

CUDA = torch.device("cuda", 0)
HALF = AttentionNeeds(torch.bfloat16)
LENGTHS = [3, 1, 6, 2]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    scale: float | None,
    window: tuple[int, int],
    groups: bool,
) -> Tensor:
    """Attention by one mask, for heads of one width, with windows counted as flash-attn does: both ends included, -1 for no limit."""
    assert query.size(-1) == key.size(-1) == value.size(-1)
    if not groups:
        assert query.size(1) == key.size(1)
    key, value = (each.repeat_interleave(query.size(1) // each.size(1), 1) for each in (key, value))
    place = torch.arange(len(query))
    row = torch.bucketize(place, bounds[1:].long(), right=True)
    distance = place.unsqueeze(1) - place
    mask = row.unsqueeze(1) == row
    left, right = window
    if left >= 0:
        mask &= distance <= left
    if right >= 0:
        mask &= distance >= -right
    scores = torch.einsum("qhd,khd->hqk", query, key) * (query.size(-1) ** -0.5 if scale is None else scale)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), value)


def torch_2_10(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    return_aux: Any = None,
) -> Tensor:
    assert cu_seq_q is cu_seq_k
    assert max_q == max_k == max(LENGTHS)
    assert return_aux is None
    return attend(query, key, value, cu_seq_q, None, (-1, 0 if is_causal else -1), False)


def torch_2_11(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    assert isinstance(window_size, tuple)  # compared with (-1, 0) inside torch
    return attend(query, key, value, cu_seq_q, scale, window_size, False)


def torch_2_12(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:
    assert isinstance(window_size, tuple)
    assert seqused_k is block_table is num_splits is None
    return attend(query, key, value, cu_seq_q, scale, window_size, enable_gqa)


def flash_2_0(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    return_attn_probs: bool = False,
) -> Tensor:
    assert dropout_p == 0.0
    return attend(q, k, v, cu_seqlens_q, softmax_scale, (-1, 0 if causal else -1), True)


def flash_2_8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    assert softcap == dropout_p == 0.0
    return attend(q, k, v, cu_seqlens_q, softmax_scale, (window_size[0], 0 if causal else window_size[1]), True)


def flash_3(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Tensor:
    assert seqused_q is seqused_k is qv is None
    return attend(q, k, v, cu_seqlens_q, softmax_scale, (window_size[0], 0 if causal else window_size[1]), True)


def flash_3_beta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    deterministic: bool = False,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    output = attend(q, k, v, cu_seqlens_q, softmax_scale, (window_size[0], 0 if causal else window_size[1]), True)
    return output, torch.zeros(())


def install(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0), **stubs: Any) -> None:
    """Make ``flash_attn``, ``flash_attn_interface`` and torch's varlen what the stubs are; None for missing."""
    names = {"two": "flash_attn", "three": "flash_attn_interface", "varlen": "torch.nn.attention.varlen"}
    for which, name in names.items():
        stub: Callable[..., Any] | None = stubs.get(which)
        module = None
        if stub is not None:
            module = ModuleType(name)
            setattr(module, "varlen_attn" if which == "varlen" else "flash_attn_varlen_func", stub)
            if which == "two":
                module.__version__ = "2.8.3"  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


KERNELS = [
    ("varlen", torch_2_10),
    ("varlen", torch_2_11),
    ("varlen", torch_2_12),
    ("two", flash_2_0),
    ("two", flash_2_8),
    ("three", flash_3),
    ("three", flash_3_beta),
]


@pytest.mark.parametrize(("which", "stub"), KERNELS)
@pytest.mark.parametrize("window", [None, 2])
def test_each_signature_gets_the_right_call(
    which: str, stub: Callable[..., Any], window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, **{which: stub})
    needs = AttentionNeeds(torch.bfloat16, window=window is not None)
    kernel, reasons = find_kernel("sdpa", CUDA, needs)
    if window is not None and stub in (torch_2_10, flash_2_0):
        assert kernel is None
        assert "has no sliding windows, which the model uses" in "; ".join(reasons)
        return
    assert kernel is not None
    torch.manual_seed(0)
    # The values of latent attention are narrower.
    shapes = ((4, 8), (2, 8), (2, 6))
    tensors = [torch.randn(1, heads, sum(LENGTHS), width, requires_grad=True) for heads, width in shapes]
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    outputs = [
        packed_attention(
            nn.Module(),
            *tensors,
            None,
            scaling=0.3,
            sliding_window=window,
            packed_rows=PackedRows(tuple(LENGTHS), bounds, None, choice),
        )[0]
        for choice in (kernel, None)
    ]
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-5, atol=1e-6)
    weights = torch.randn_like(outputs[0])
    for ours, theirs in zip(*(torch.autograd.grad(each, tensors, weights) for each in outputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_the_installed_torch_has_a_known_signature() -> None:
    """2.13's is 2.12's; a release that changes it fails here, before it fails on a GPU."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    takes = inspect.signature(varlen.varlen_attn).parameters
    known = [list(inspect.signature(stub).parameters) for stub in (torch_2_10, torch_2_11, torch_2_12)]
    assert list(takes) in known


def test_the_order_of_preference(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, two=flash_2_8, three=flash_3, varlen=torch_2_12)
    assert [name(find_kernel(each, CUDA, HALF)) for each in ("sdpa", "flash_attention_2", "flash_attention_3")] == [
        "flash-attn 3",
        "flash-attn 2.8.3",
        "flash-attn 3",
    ]
    # Flash-attn 3 drops no attention weights; the second version does.
    assert name(find_kernel("sdpa", CUDA, AttentionNeeds(torch.float16, dropout=True))) == "flash-attn 2.8.3"
    install(monkeypatch, capability=(8, 0), two=flash_2_8, three=flash_3, varlen=torch_2_12)
    assert name(find_kernel("sdpa", CUDA, HALF)) == "flash-attn 2.8.3"
    install(monkeypatch, varlen=torch_2_12)
    assert name(find_kernel("sdpa", CUDA, HALF)).startswith("the varlen attention of torch")


def name(found: Any) -> str:
    kernel, _ = found
    return str(kernel.name)


@pytest.mark.parametrize(
    ("stubs", "capability", "needs", "message"),
    [
        ({}, (9, 0), HALF, r"has no torch\.nn\.attention\.varlen \(added in 2\.10\)"),
        ({"varlen": torch_2_12}, (7, 5), HALF, "need compute capability 8.0"),
        (
            {"varlen": torch_2_12},
            (9, 0),
            AttentionNeeds(torch.float32),
            "compute in bfloat16 or float16, and the model",
        ),
        ({"varlen": torch_2_12}, (9, 0), AttentionNeeds(torch.bfloat16, dropout=True), "no attention dropout"),
        ({"varlen": torch_2_12}, (9, 0), AttentionNeeds(torch.bfloat16, head_size=512), "heads of at most 256"),
        ({"varlen": lambda query: query}, (9, 0), HALF, "has an unknown signature"),
        ({"two": lambda q: q}, (9, 0), HALF, "flash_attn_varlen_func of flash-attn 2.8.3 has an unknown signature"),
    ],
)
def test_without_a_kernel_there_is_a_reason(
    stubs: dict[str, Any],
    capability: tuple[int, int],
    needs: AttentionNeeds,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, capability, **stubs)
    kernel, reasons = find_kernel("sdpa", CUDA, needs)
    assert kernel is None
    assert re.search(message, "; ".join(reasons))


@pytest.mark.parametrize("attention", ["flash_attention_2", "flash_attention_3"])
def test_a_library_that_the_model_asks_for_has_to_be_there(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, varlen=torch_2_12)
    with pytest.raises(ConfigError, match=rf"attn_implementation={attention}, but flash_attn.* cannot be imported"):
        find_kernel(attention, CUDA, HALF)
    with pytest.raises(ConfigError, match="need a CUDA device, and this is cpu; set it to sdpa"):
        find_kernel(attention, torch.device("cpu"), HALF)


def test_the_choice_is_said_at_start(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = scenarios.build(scenarios.ALONE, model_folder, trained=False)
    install(monkeypatch)
    with caplog.at_level(logging.INFO, "rollcast_fsdp"):
        assert use_packed_attention(engine.module, "sdpa", CUDA, torch.bfloat16) is None
        install(monkeypatch, two=flash_2_8)
        assert use_packed_attention(engine.module, "sdpa", CUDA, torch.bfloat16) is not None
    slow, fast = caplog.records[-2:]
    assert slow.levelname == "WARNING"
    assert "one SDPA call for each row, which is slow: flash_attn_interface cannot be imported" in slow.message
    assert fast.message == "packed rows attend with flash-attn 2.8.3"
