"""Entropy, sum of squares and exact KL over a vocabulary."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollcast.contracts.algorithm import Denominators, kl_penalties, needs_vocabulary
from rollcast.contracts.engine import LossInputs
from rollcast_algorithms import entropy, full, k3, make_ppo_loss, sum_pi_squared, token_mean, vanilla

INF = float("inf")


def test_worked_values() -> None:
    # Probabilities 1/2, 1/4, 1/4 against 1/4, 1/4, 1/2.
    policy = torch.tensor([[[0.5, 0.25, 0.25]]]).log()
    ref = torch.tensor([[[0.25, 0.25, 0.5]]]).log()
    two = math.log(2)
    torch.testing.assert_close(entropy(policy), torch.tensor([[1.5 * two]]))
    torch.testing.assert_close(sum_pi_squared(policy), torch.tensor([[3 / 8]]))
    torch.testing.assert_close(full(policy, ref), torch.tensor([[0.5 * two - 0.25 * two]]))


def test_a_shift_of_the_logits_changes_nothing() -> None:
    logits, ref = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
    for function in (entropy, sum_pi_squared):
        torch.testing.assert_close(function(logits + 3), function(logits))
    torch.testing.assert_close(full(logits + 3, ref - 2), full(logits, ref))


def test_tokens_that_are_ruled_out_add_nothing() -> None:
    logits = torch.tensor([[[0.0, 0.0, -INF]]], requires_grad=True)
    ref = torch.tensor([[[0.0, 0.0, -1.0]]])
    for result, expected in (
        (entropy(logits), math.log(2)),
        (sum_pi_squared(logits), 0.5),
        (full(logits, ref), math.log(2 + math.exp(-1)) - math.log(2)),
    ):
        (gradient,) = torch.autograd.grad(result.sum(), logits)
        assert result.item() == pytest.approx(expected)
        assert gradient.isfinite().all()


@given(st.integers(0, 10_000))
@settings(deadline=None, max_examples=30)
def test_bounds(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits, ref = (5 * torch.randn(2, 3, 7, generator=generator, dtype=torch.float64) for _ in range(2))
    assert (entropy(logits) >= -1e-12).all()
    assert (entropy(logits) <= math.log(7) + 1e-12).all()
    assert ((sum_pi_squared(logits) >= 1 / 7 - 1e-12) & (sum_pi_squared(logits) <= 1 + 1e-12)).all()
    assert (full(logits, ref) >= -1e-12).all()
    torch.testing.assert_close(full(logits, logits), torch.zeros(2, 3, dtype=torch.float64))


def test_half_precision_is_computed_in_float32() -> None:
    logits = torch.randn(1, 2, 9).bfloat16()
    for result, wide in (
        (entropy(logits), entropy(logits.float())),
        (sum_pi_squared(logits), sum_pi_squared(logits.float())),
        (full(logits, -logits), full(logits.float(), -logits.float())),
    ):
        assert result.dtype == torch.float32
        torch.testing.assert_close(result, wide)


def test_full_is_refused_where_only_sampled_tokens_are_known() -> None:
    assert needs_vocabulary(kl_penalties.get("full"))
    assert not needs_vocabulary(k3)
    with pytest.raises(ValueError, match=r"needs the log-probs of the whole vocabulary, \[B, T, V\]"):
        full(torch.zeros(2, 3), torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"log_probs is \[1, 2, 3\], but ref_log_probs is \[1, 2, 4\]"):
        full(torch.zeros(1, 2, 3), torch.zeros(1, 2, 4))
    loss, inputs = make_ppo_loss(vanilla, token_mean, kl_penalty=full, kl_loss_coef=0.1), one_row()
    with pytest.raises(ValueError, match=r"which a loss function does not see.*k3\+"):
        loss(inputs)


def one_row(vocabulary_kl: Tensor | None = None) -> LossInputs:
    zeros = torch.zeros(1, 3)
    columns = {"old_log_probs": zeros, "advantages": zeros}
    mask = torch.tensor([[1, 1, 0]])
    return LossInputs(zeros, None, None, mask, columns, Denominators(2.0, 1.0, 3.0), vocabulary_kl)


def test_the_loss_takes_full_from_the_engine() -> None:
    kl = torch.tensor([[1.0, 2.0, float("nan")]], requires_grad=True)
    out = make_ppo_loss(vanilla, token_mean, kl_penalty=full, kl_loss_coef=0.1)(one_row(kl))
    assert float(out.loss.detach()) == pytest.approx(0.15)
    assert float(out.metrics["actor/kl_loss"]) == pytest.approx(1.5)
    (gradient,) = torch.autograd.grad(out.loss, kl)
    torch.testing.assert_close(gradient, torch.tensor([[0.05, 0.05, 0.0]]))
