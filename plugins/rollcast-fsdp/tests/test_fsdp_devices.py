"""Arithmetic of the kernels and of a step on each device, against a reference on the same device."""

from __future__ import annotations

import sys
from pathlib import Path

import fsdp_scenarios as scenarios
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rollcast.contracts.engine import ForwardSettings, OptimConfig
from rollcast_engine.optim import build_optimizer
from rollcast_fsdp.attention import PackedRows, packed_attention
from rollcast_fsdp.fused import linear_stats
from rollcast_fsdp.varlen import AttentionNeeds, VarlenKernel, find_kernel
from rollcast_testing.cuda import DEVICES, needs_devices, on_cuda
from rollcast_testing.ranks import Ranks

ALONE = scenarios.ALONE
#: Module of each kernel of packed rows.
LIBRARIES = ("flash_attn_interface", "flash_attn", "torch.nn.attention.varlen")
LENGTHS = [37, 1, 130, 64]


def engine_device(device: str) -> None:
    """Skip a test of a whole engine that would run on another device: an engine takes CUDA wherever it is visible."""
    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("a CUDA device is visible, so an engine does not compute on the CPU")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
def test_fused_log_probs_are_the_plain_ones(device: str, dtype: torch.dtype, tolerance: float) -> None:
    """Values and gradients; in bf16 against a reference in float32 of the same rounded inputs."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(rows, 64, generator=generator) * 0.3 for rows in (300, 2000))
    inputs = [each.to(device, dtype).requires_grad_() for each in (hidden, weight)]
    plain = [each.detach().float().requires_grad_() for each in inputs]
    tokens = torch.randint(2000, (300,), generator=generator).to(device)
    stats = linear_stats(*inputs, None, tokens, 0.7, chunk_size=128)
    scores = (plain[0] @ plain[1].T / 0.7).log_softmax(-1)
    expected = [
        scores.gather(1, tokens.unsqueeze(1)).squeeze(1),
        -(scores.exp() * scores).sum(1),
        (2 * scores).exp().sum(1),
    ]
    found = [stats.log_probs, stats.entropy, stats.sum_pi_squared]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    shares = [torch.randn(300, generator=generator).to(device) for _ in found]
    for ours, theirs in zip(
        torch.autograd.grad(found, inputs, shares), torch.autograd.grad(expected, plain, shares), strict=True
    ):
        gap = (ours.float() - theirs).norm() / theirs.norm()
        assert gap < tolerance, f"the gradient is {gap:.1e} of its norm away"


@on_cuda
def test_fused_log_probs_take_little_memory() -> None:
    """At Qwen2.5's vocabulary, forward and backward take a quarter of the full float32 logits at most."""
    positions, vocabulary = 8192, 151_936
    hidden = torch.randn(positions, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocabulary, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    tokens = torch.randint(vocabulary, (positions,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_stats(hidden, weight, None, tokens, entropy=False, sum_pi_squared=False).log_probs.sum().backward()
    taken = torch.cuda.max_memory_allocated() - before
    assert taken <= positions * vocabulary * 4 / 4, f"{taken / 1e9:.2f} GB"


def only(library: str, monkeypatch: pytest.MonkeyPatch, device: str) -> VarlenKernel:
    """Return the kernel of one library, or skip with the reason why it is not available."""
    for other in LIBRARIES:
        if other != library:
            monkeypatch.setitem(sys.modules, other, None)
    kernel, reasons = find_kernel("sdpa", torch.device(device, 0), AttentionNeeds(torch.bfloat16))
    if kernel is None:
        pytest.skip("; ".join(reasons))
    return kernel


def attend(tensors: list[Tensor], kernel: VarlenKernel | None) -> Tensor:
    """Return the attention of packed rows ``[1, N, H, D]``; without a kernel, by one SDPA call for each row."""
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).int().to(tensors[0].device)
    rows = PackedRows(tuple(LENGTHS), bounds, None, kernel)
    output: Tensor = packed_attention(nn.Module(), *tensors, None, scaling=0.3, packed_rows=rows)[0]
    return output


def heads(device: str, dtype: torch.dtype) -> list[Tensor]:
    """Return query ``[1, 8, N, 64]``, key and value ``[1, 2, N, 64]``."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, count, sum(LENGTHS), 64) for count in (8, 2, 2)]
    return [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes]


@on_cuda
@pytest.mark.parametrize("library", LIBRARIES)
def test_each_kernel_attends_as_sdpa_does_row_by_row(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, tensors = only(library, monkeypatch, "cuda"), heads("cuda", torch.bfloat16)
    packed, rows = attend(tensors, kernel), attend(tensors, None)
    torch.testing.assert_close(packed, rows, rtol=2e-2, atol=2e-2)
    weights = torch.randn_like(packed)
    for ours, theirs in zip(
        torch.autograd.grad(packed, tensors, weights), torch.autograd.grad(rows, tensors, weights), strict=True
    ):
        gap = (ours.float() - theirs.float()).norm() / theirs.float().norm()
        assert gap < 2e-2, f"the gradient is {gap:.1e} of its norm away"


@pytest.mark.parametrize("device", DEVICES)
def test_sdpa_row_by_row_attends_within_the_rows(device: str) -> None:
    """The reference of the kernels, against one masked softmax over the whole pack."""
    query, key, value = (each[0].detach() for each in heads(device, torch.float32))
    place = torch.arange(sum(LENGTHS), device=device)
    row = torch.bucketize(place, torch.tensor(LENGTHS, device=device).cumsum(0), right=True)
    mask = (row.unsqueeze(1) == row) & (place.unsqueeze(1) >= place)
    key, value = (each.repeat_interleave(4, 0) for each in (key, value))
    scores = (query @ key.transpose(1, 2) * 0.3).masked_fill(~mask, -torch.inf)
    expected = (scores.softmax(-1) @ value).transpose(0, 1).unsqueeze(0)
    found = attend(heads(device, torch.float32), None)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("packs", [False, True], ids=["padded", "packed"])
def test_a_step_in_bf16_is_that_in_float32(device: str, packs: bool, model_folder: Path) -> None:
    """The canary of mixed precision: four steps lower the loss alike, and the weights stay in float32."""
    engine_device(device)
    runs = {
        dtype: scenarios.train(ALONE, model_folder, [6], param_dtype=dtype, use_remove_padding=packs)
        for dtype in ("fp32", "bf16")
    }
    for half, full in zip(runs["bf16"]["history"], runs["fp32"]["history"], strict=True):
        assert half.metrics["nll"] == pytest.approx(full.metrics["nll"], rel=0.02)
        assert half.grad_norm == pytest.approx(full.grad_norm, rel=0.05)
    assert {each.dtype for each in runs["bf16"]["weights"].values()} == {torch.float32}


@pytest.mark.parametrize("device", DEVICES)
def test_updates_below_the_resolution_of_bf16_add_up(device: str, model_folder: Path) -> None:
    """Passes in bf16 with float32 master weights: twenty small steps move what one step in bf16 weights could not.

    A step moves a weight by at most the learning rate, 2^-14. Weights of bf16 from 2^-4 on are at least 2^-11 apart, and
    round such a step away.
    """
    engine_device(device)
    optim = OptimConfig(lr=2.0**-14, weight_decay=0.0, eps=1e-12)
    moved = {}
    for master in ("fp32", "bf16"):
        engine = scenarios.build(ALONE, model_folder, optim=optim, param_dtype="bf16", model_dtype=master)
        before = scenarios.weights(engine)
        for _ in range(20):
            scenarios.step_once(engine, ALONE, seed=0)
        after = scenarios.weights(engine)
        large = {name: before[name].float().abs() >= 2.0**-4 for name in before}
        steps = [(after[name].float() - before[name].float()).abs()[large[name]] for name in before]
        moved[master] = torch.cat(steps)
    assert min(map(len, moved.values())) > 100
    assert not moved["bf16"].any()
    # Adam's first steps are about the learning rate each where a gradient keeps its sign.
    assert moved["fp32"].median() > 5 * optim.lr


@pytest.mark.parametrize("device", DEVICES)
def test_adamw_is_fused(device: str) -> None:
    """The fused step is that of the loop over parameters."""
    generator = torch.Generator().manual_seed(0)
    start, slope = (torch.randn(5, 7, generator=generator) for _ in range(2))
    found = []
    for options in ({}, {"fused": False, "foreach": False}):
        parameter = nn.Parameter(start.to(device))
        optimizer = build_optimizer([parameter], OptimConfig(lr=0.1, optimizer_kwargs=options))
        assert optimizer.defaults["fused"] is not bool(options)
        for _ in range(3):
            parameter.grad = slope.to(device)
            optimizer.step()
        found.append(parameter.detach())
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_the_group_of_one_rank_uses_the_device_s_collectives(device: str, model_folder: Path) -> None:
    engine_device(device)
    engine = scenarios.build(ALONE, model_folder, param_dtype="bf16")
    assert engine.device.type == device
    assert dist.get_backend() == {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}[device]
    value = torch.full((3,), 2.0, device=engine.device)
    dist.all_reduce(value)
    assert value.tolist() == [2.0] * 3


@pytest.mark.parametrize("size", [pytest.param(size, marks=needs_devices(size)) for size in (2, 4)])
def test_ranks_over_nccl_train_as_one_does(size: int, model_folder: Path, ranks: Ranks) -> None:
    settings = ForwardSettings(micro_batch_size_per_gpu=2)
    alone = scenarios.train(ALONE, model_folder, [2 * size], settings=settings)
    results = ranks.run(scenarios.train, world_size=size, folder=model_folder, splits=[2] * size, settings=settings)
    for name, expected in alone["weights"].items():
        torch.testing.assert_close(results[0]["weights"][name], expected, rtol=1e-4, atol=1e-5)


@on_cuda
def test_there_is_a_kernel_of_packed_rows() -> None:
    kernel, reasons = find_kernel("sdpa", torch.device("cuda", 0), AttentionNeeds(torch.bfloat16))
    assert kernel is not None, "; ".join(reasons)
