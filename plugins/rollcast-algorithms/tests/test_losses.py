"""The loss functions that engines run: terms, metrics, pickling, and independence of the split."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollcast.contracts.algorithm import (
    Denominators,
    LossAggregation,
    PolicyLossInputs,
    PolicyLossOutput,
    policy_loss,
)
from rollcast.contracts.engine import LossFunction, LossInputs
from rollcast.errors import ColumnError
from rollcast_algorithms import (
    PpoLoss,
    SftLoss,
    k3,
    make_ppo_loss,
    seq_mean_token_mean,
    seq_mean_token_sum,
    seq_mean_token_sum_norm,
    token_mean,
    token_sum,
    vanilla,
)

AGGREGATIONS = [token_mean, token_sum, seq_mean_token_sum, seq_mean_token_sum_norm, seq_mean_token_mean]
NAN = float("nan")


def full_loss(aggregation: LossAggregation = token_mean) -> PpoLoss:
    return make_ppo_loss(
        vanilla,
        aggregation,
        clip_ratio_low=0.2,
        clip_ratio_high=0.28,
        clip_ratio_c=3.0,
        entropy_coeff=0.01,
        kl_penalty=k3,
        kl_loss_coef=0.1,
    )


def batch(seed: int = 0, rows: int = 6, width: int = 5) -> LossInputs:
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.rand(rows, width, generator=generator) < 0.6).long()
    drawn = [torch.randn(rows, width, generator=generator, dtype=torch.float64) for _ in range(5)]
    new, old, ref, advantages, entropy = (tensor.masked_fill(mask == 0, NAN) for tensor in drawn)
    return LossInputs(
        log_probs=new.requires_grad_(),
        entropy=entropy,
        values=None,
        response_mask=mask,
        columns={"old_log_probs": old, "ref_log_prob": ref, "advantages": advantages},
        denominators=Denominators(float(mask.sum()), float(mask.any(-1).sum()), float(width)),
    )


def rows_of(inputs: LossInputs, keep: Tensor) -> LossInputs:
    assert inputs.log_probs is not None
    assert inputs.entropy is not None
    return replace(
        inputs,
        log_probs=inputs.log_probs[keep],
        entropy=inputs.entropy[keep],
        response_mask=inputs.response_mask[keep],
        columns={name: column[keep] for name, column in inputs.columns.items()},
    )


def run(loss: LossFunction, inputs: LossInputs, owner: Tensor, parts: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Gradient, and the sums of loss and metrics over the parts."""
    assert inputs.log_probs is not None
    leaf = inputs.log_probs.detach().clone().requires_grad_()
    sums: dict[str, Tensor] = {}
    for part in range(parts):
        out = loss(rows_of(replace(inputs, log_probs=leaf), owner == part))
        out.loss.backward()  # type: ignore[no-untyped-call]
        for name, value in {"loss": out.loss.detach(), **out.metrics}.items():
            assert not value.requires_grad
            sums[name] = sums.get(name, torch.zeros((), dtype=torch.float64)) + value
    assert leaf.grad is not None
    return leaf.grad, sums


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@given(seed=st.integers(0, 10_000), parts=st.integers(2, 7))
@settings(deadline=None, max_examples=25)
def test_ppo_is_the_same_however_the_batch_is_split(aggregation: LossAggregation, seed: int, parts: int) -> None:
    inputs, loss = batch(seed), full_loss(aggregation)
    rows = len(inputs.response_mask)
    owner = torch.randint(0, parts, (rows,), generator=torch.Generator().manual_seed(seed))
    gradient, sums = run(loss, inputs, owner, parts)
    expected_gradient, expected = run(loss, inputs, torch.zeros(rows), 1)
    assert gradient.isfinite().all()
    assert (gradient[inputs.response_mask == 0] == 0).all()
    torch.testing.assert_close(gradient, expected_gradient)
    torch.testing.assert_close(sums, expected)


def test_ppo_adds_its_terms() -> None:
    out = full_loss()(batch())
    terms = out.metrics
    expected = terms["actor/pg_loss"] - 0.01 * terms["actor/entropy_loss"] + 0.1 * terms["actor/kl_loss"]
    torch.testing.assert_close(out.loss.detach(), expected)
    assert set(terms) == {
        "actor/pg_loss",
        "actor/entropy_loss",
        "actor/kl_loss",
        "actor/kl",
        "actor/clip_fraction",
        "actor/clip_fraction_lower",
    }


def test_ppo_averages_token_metrics_over_the_mini_batch_whatever_the_aggregation() -> None:
    inputs = batch()
    results = [full_loss(aggregation)(inputs).metrics for aggregation in AGGREGATIONS]
    for name in ("actor/kl", "actor/clip_fraction", "actor/clip_fraction_lower"):
        assert len({float(metrics[name]) for metrics in results}) == 1
    assert inputs.log_probs is not None
    chosen = inputs.response_mask == 1
    kl = (inputs.columns["old_log_probs"] - inputs.log_probs.detach())[chosen].mean()
    torch.testing.assert_close(results[0]["actor/kl"], kl)


def test_ppo_without_extras_needs_two_columns_only() -> None:
    inputs = batch()
    columns = {name: inputs.columns[name] for name in ("old_log_probs", "advantages")}
    out = make_ppo_loss(vanilla, token_mean)(replace(inputs, entropy=None, columns=columns))
    torch.testing.assert_close(out.loss.detach(), out.metrics["actor/pg_loss"])
    assert "actor/kl_loss" not in out.metrics
    assert "actor/entropy_loss" not in out.metrics


def test_ppo_reports_what_has_no_weight() -> None:
    out = make_ppo_loss(vanilla, token_mean, kl_penalty=k3)(batch())
    torch.testing.assert_close(out.loss.detach(), out.metrics["actor/pg_loss"])
    assert out.metrics["actor/kl_loss"] > 0
    assert "actor/entropy_loss" in out.metrics


def test_metrics_of_a_policy_loss_stand_under_the_actor_however_it_names_them() -> None:
    def named(inputs: PolicyLossInputs) -> PolicyLossOutput:
        ones = torch.ones_like(inputs.log_probs).detach()
        return PolicyLossOutput(-inputs.log_probs, {"one": ones, "actor/two": 2 * ones})

    metrics = make_ppo_loss(named, token_mean)(batch()).metrics
    assert (float(metrics["actor/one"]), float(metrics["actor/two"])) == pytest.approx((1.0, 2.0))
    assert not any(name.startswith("actor/actor/") for name in metrics)


def test_ppo_survives_pickling() -> None:
    loss = full_loss()
    again = pickle.loads(pickle.dumps(loss))
    assert again == loss
    torch.testing.assert_close(again(batch()).loss, loss(batch()).loss)


def test_ppo_says_what_is_missing() -> None:
    inputs, loss = batch(), full_loss()
    with pytest.raises(ColumnError, match="needs the column 'advantages'; the batch has: old_log_probs"):
        loss(replace(inputs, columns={"old_log_probs": inputs.columns["old_log_probs"]}))
    with pytest.raises(ValueError, match="needs log_probs"):
        loss(replace(inputs, log_probs=None))
    with pytest.raises(ValueError, match=r"entropy_coeff is 0.01, but the engine gave no entropy"):
        loss(replace(inputs, entropy=None))
    with pytest.raises(ValueError, match="there is no kl_penalty to weigh"):
        make_ppo_loss(vanilla, token_mean, kl_loss_coef=0.1)


def test_options_reach_the_policy_loss_and_are_a_copy() -> None:
    options = {"beta": 2}
    loss = make_ppo_loss(vanilla, token_mean, options=options)
    options["beta"] = 3
    assert loss.options == {"beta": 2}


def test_sft_is_the_mean_negative_log_likelihood() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    log_probs = torch.tensor([[-1.0, -2.0, NAN], [-6.0, float("-inf"), NAN]], requires_grad=True)
    out = SftLoss()(LossInputs(log_probs, None, None, mask, {}, Denominators(3, 2, 3)))
    out.loss.backward()  # type: ignore[no-untyped-call]
    assert out.loss.item() == out.metrics["sft/loss"].item() == pytest.approx(3.0)
    torch.testing.assert_close(log_probs.grad, -mask / 3)


def test_sft_is_the_same_however_the_batch_is_split() -> None:
    inputs = batch(5)
    one, many = (run(SftLoss(), inputs, owner, 3) for owner in (torch.zeros(6), torch.tensor([0, 2, 1, 0, 2, 2])))
    torch.testing.assert_close(one, many)


def test_sft_refuses_a_value_model() -> None:
    with pytest.raises(ValueError, match="which a value model does not give"):
        SftLoss()(replace(batch(), log_probs=None))


def test_a_policy_loss_reads_the_columns_that_it_declares() -> None:
    @policy_loss(needs={"trust"}, optional={"entropy_bonus"})
    def trusting(inputs: PolicyLossInputs) -> PolicyLossOutput:
        assert set(inputs.columns) <= {"trust"}
        return PolicyLossOutput(vanilla(inputs).losses * inputs.column("trust"))

    inputs = batch()
    loss = make_ppo_loss(trusting, token_mean, kl_penalty=k3, use_rollout_is_weights=True)
    assert loss.needs.columns == {"old_log_probs", "advantages", "trust", "ref_log_prob", "rollout_is_weights"}
    assert loss.needs.optional == {"entropy_bonus"}
    doubled = {**inputs.columns, "trust": torch.full_like(inputs.columns["advantages"], 2.0)}
    trusted = make_ppo_loss(trusting, token_mean)(replace(inputs, columns=doubled)).loss
    torch.testing.assert_close(trusted, 2 * make_ppo_loss(vanilla, token_mean)(inputs).loss)
    with pytest.raises(ColumnError, match="no column 'trust'; it has: none"):
        make_ppo_loss(trusting, token_mean)(inputs)
