"""The KL estimators: worked values, unbiasedness, and bounds."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollcast.contracts.algorithm import KlPenalty
from rollcast_algorithms.kl import absolute, absolute_plus, k1, k1_plus, k2, k2_plus, k3, k3_plus

STRAIGHT_THROUGH = [(k1_plus, k1), (absolute_plus, absolute), (k2_plus, k2), (k3_plus, k3)]
ESTIMATES = [k1, absolute, k2, k3, k1_plus, absolute_plus, k2_plus, k3_plus]


def test_worked_values() -> None:
    log_probs = torch.tensor([[math.log(0.5), math.log(0.25)]])
    ref = torch.tensor([[math.log(0.25), math.log(0.5)]])
    two = math.log(2)
    torch.testing.assert_close(k1(log_probs, ref), torch.tensor([[two, -two]]))
    torch.testing.assert_close(absolute(log_probs, ref), torch.tensor([[two, two]]))
    torch.testing.assert_close(k2(log_probs, ref), torch.tensor([[two**2 / 2, two**2 / 2]]))
    torch.testing.assert_close(k3(log_probs, ref), torch.tensor([[0.5 - 1 + two, 2 - 1 - two]]))


@given(st.lists(st.floats(-5, 5), min_size=4, max_size=4), st.lists(st.floats(-5, 5), min_size=4, max_size=4))
@settings(deadline=None)
def test_k1_and_k3_have_the_divergence_as_their_mean(policy: list[float], reference: list[float]) -> None:
    # The exact expectation over a vocabulary of four, instead of samples; far from k3's clamps only.
    p = torch.tensor(policy, dtype=torch.float64).log_softmax(-1)
    q = torch.tensor(reference, dtype=torch.float64).log_softmax(-1)
    exact = (p.exp() * (p - q)).sum()
    torch.testing.assert_close((p.exp() * k1(p, q)).sum(), exact)
    if (q - p).max() < 2 and (q - p).min() > -10:
        torch.testing.assert_close((p.exp() * k3(p, q)).sum(), exact)


@pytest.mark.parametrize("estimate", ESTIMATES)
@pytest.mark.parametrize("gap", [0.0, 1e-3, 30.0, -30.0, 1e4, -1e4])
def test_values_and_gradients_are_finite(estimate: KlPenalty, gap: float) -> None:
    log_probs = torch.tensor([[-1.0 + gap]], requires_grad=True)
    result = estimate(log_probs, torch.tensor([[-1.0]]))
    (gradient,) = torch.autograd.grad(result.sum(), log_probs)
    assert result.isfinite().all()
    assert gradient.isfinite().all()


@given(st.floats(-1e6, 1e6, width=32))
@settings(deadline=None)
def test_k2_and_k3_are_never_negative_and_k3_is_bounded(gap: float) -> None:
    log_probs, ref = torch.tensor([gap]), torch.zeros(1)
    assert k2(log_probs, ref) >= 0
    assert 0 <= k3(log_probs, ref) <= 10


def test_k3_clamps_as_documented() -> None:
    log_probs = torch.tensor([30.0, 5.0, -3.0, -30.0], requires_grad=True)
    result = k3(log_probs, torch.zeros(4))
    (gradient,) = torch.autograd.grad(result.sum(), log_probs)
    torch.testing.assert_close(result, torch.tensor([10.0, math.exp(-5) + 4, 10.0, 10.0]))
    torch.testing.assert_close(gradient, torch.tensor([0.0, 1 - math.exp(-5), 0.0, 0.0]))


def test_k3_keeps_its_digits_where_the_policies_are_close() -> None:
    gap = torch.tensor([2.0**-12])
    torch.testing.assert_close(k3(gap, torch.zeros(1)), gap.square() / 2, rtol=2e-3, atol=0)


@pytest.mark.parametrize("estimate", ESTIMATES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(estimate: KlPenalty, dtype: torch.dtype) -> None:
    log_probs, ref = torch.tensor([-1.0, -2.5], dtype=dtype), torch.tensor([-1.25, -2.0], dtype=dtype)
    assert estimate(log_probs, ref).dtype == torch.float32
    torch.testing.assert_close(estimate(log_probs, ref), estimate(log_probs.float(), ref.float()))


@pytest.mark.parametrize("estimate", ESTIMATES)
def test_shapes_are_never_broadcast(estimate: KlPenalty) -> None:
    with pytest.raises(ValueError, match=r"log_probs is \[2, 1\], but ref_log_probs is \[2, 3\]"):
        estimate(torch.zeros(2, 1), torch.zeros(2, 3))


@pytest.mark.parametrize(("plus", "estimate"), STRAIGHT_THROUGH)
def test_straight_through_has_the_value_of_its_estimate_and_the_gradient_of_k2(
    plus: KlPenalty, estimate: KlPenalty
) -> None:
    log_probs = torch.tensor([[-1.0, -0.25, -3.0]], requires_grad=True)
    ref = torch.tensor([[-2.0, -0.5, -1.0]])
    value = plus(log_probs, ref)
    (gradient,) = torch.autograd.grad(value.sum(), log_probs)
    torch.testing.assert_close(value.detach(), estimate(log_probs, ref).detach())
    torch.testing.assert_close(gradient, (log_probs - ref).detach())


def test_the_gradient_of_k2_is_that_of_the_divergence() -> None:
    # In expectation over the policy's own samples, here over a vocabulary of four.
    logits = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.0, 0.5, -0.5, 1.0], dtype=torch.float64).log_softmax(-1)
    policy = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad((policy.exp() * (policy - ref)).sum(), logits, retain_graph=True)
    for penalty in (k2, k1_plus, absolute_plus, k3_plus):
        (estimated,) = torch.autograd.grad(
            (policy.exp().detach() * penalty(policy, ref)).sum(), logits, retain_graph=True
        )
        torch.testing.assert_close(estimated, exact)
