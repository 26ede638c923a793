"""PPO's clipped surrogate: a worked table, a scalar reference, and its gradient's laws."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollcast.contracts.algorithm import PolicyLossInputs
from rollcast_algorithms.policy_losses import vanilla

finite = st.floats(-30, 30, allow_nan=False, width=32)


def inputs_of(ratios: list[float], advantages: list[float], **clip: Any) -> PolicyLossInputs:
    old = torch.full((1, len(ratios)), -1.0)
    new = (old + torch.tensor([ratios]).log()).requires_grad_()
    return PolicyLossInputs(new, old, torch.tensor([advantages]), torch.ones(1, len(ratios)), **clip)


def reference(log_ratio: float, advantage: float, low: float, high: float, dual: float) -> float:
    ratio = math.exp(max(-20.0, min(20.0, log_ratio)))
    loss = max(-advantage * ratio, -advantage * max(1 - low, min(1 + high, ratio)))
    return min(loss, -advantage * dual) if advantage < 0 else loss


def test_worked_table() -> None:
    # Clip to [0.8, 1.28], dual clip at 3.
    cases = [
        # ratio, advantage, loss, clip_fraction, clip_fraction_lower
        (1.0, 2.0, -2.0, 0, 0),
        (1.25, 2.0, -2.5, 0, 0),  # inside clip-higher, though above 1.2
        (1.5, 2.0, -2.56, 1, 0),  # good and likelier: gains stop at 1.28
        (0.5, 2.0, -1.0, 0, 0),  # good and rarer: the plain ratio
        (0.5, -2.0, 1.6, 1, 0),  # bad and rarer: gains stop at 0.8
        (1.5, -2.0, 3.0, 0, 0),  # bad and likelier: the plain ratio ...
        (9.0, -2.0, 6.0, 0, 1),  # ... up to the dual clip
        (9.0, 0.0, 0.0, 0, 0),
    ]
    ratios, advantages, losses, clipped, lower = (list(column) for column in zip(*cases, strict=True))
    out = vanilla(inputs_of(ratios, advantages, clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=3.0))
    torch.testing.assert_close(out.losses, torch.tensor([losses]))
    assert out.metrics["clip_fraction"].tolist() == [clipped]
    assert out.metrics["clip_fraction_lower"].tolist() == [lower]
    torch.testing.assert_close(out.metrics["kl"], -torch.tensor([ratios]).log())


@given(log_ratio=finite, advantage=finite, low=st.floats(0, 1), high=st.floats(0, 3), dual=st.floats(1.01, 9))
@settings(deadline=None)
def test_agrees_with_a_scalar_reference(
    log_ratio: float, advantage: float, low: float, high: float, dual: float
) -> None:
    zero = torch.zeros(1, 1, dtype=torch.float64)
    inputs = PolicyLossInputs(zero + log_ratio, zero, zero + advantage, torch.ones(1, 1), low, high, dual)
    expected = torch.tensor([[reference(log_ratio, advantage, low, high, dual)]], dtype=torch.float64)
    torch.testing.assert_close(vanilla(inputs).losses, expected)


def test_gradient_is_ratio_times_advantage_or_nothing_where_clipped() -> None:
    inputs = inputs_of([1.1, 1.5, 0.5, 0.5, 9.0], [2.0, 2.0, 2.0, -2.0, -2.0])
    (gradient,) = torch.autograd.grad(vanilla(inputs).losses.sum(), inputs.log_probs)
    torch.testing.assert_close(gradient, torch.tensor([[-2.2, 0.0, -1.0, 0.0, 0.0]]))


def test_extreme_log_ratios_have_finite_losses_and_no_gradient() -> None:
    new = torch.tensor([[1e6, 1e6, -1e6, -1e6, float("-inf")]], requires_grad=True)
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0, 1.0]])
    out = vanilla(PolicyLossInputs(new, torch.zeros(1, 5), advantages, torch.ones(1, 5)))
    (gradient,) = torch.autograd.grad(out.losses.sum(), new)
    assert out.losses.isfinite().all()
    assert gradient.tolist() == [[0.0] * 5]
    assert out.metrics["kl"].tolist() == [[-20.0, -20.0, 20.0, 20.0, 20.0]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    wide = inputs_of([1.0, 1.5, 0.5], [1.0, 2.0, -2.0])
    half = replace(
        wide,
        log_probs=wide.log_probs.detach().to(dtype).requires_grad_(),
        old_log_probs=wide.old_log_probs.to(dtype),
        advantages=wide.advantages.to(dtype),
    )
    out = vanilla(half)
    (gradient,) = torch.autograd.grad(out.losses.sum(), half.log_probs)
    assert out.losses.dtype == torch.float32
    assert gradient.dtype == dtype
    torch.testing.assert_close(out.losses, vanilla(wide).losses, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("dual", [1.0, 0.5, -3.0, float("nan")])
def test_refuses_a_dual_clip_that_is_not_above_one(dual: float) -> None:
    with pytest.raises(ValueError, match="clip_ratio_c must be greater than 1"):
        vanilla(inputs_of([1.0], [1.0], clip_ratio_c=dual))


def test_refuses_negative_clip_ratios_and_mismatched_shapes() -> None:
    with pytest.raises(ValueError, match=r"must not be negative, got -0\.1 and 0\.2"):
        vanilla(inputs_of([1.0], [1.0], clip_ratio_low=-0.1))
    with pytest.raises(ValueError, match=r"advantages is \[1, 1\], but the mask is \[1, 2\]"):
        vanilla(replace(inputs_of([1.0, 1.0], [1.0, 1.0]), advantages=torch.ones(1, 1)))
