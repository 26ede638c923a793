"""What the families of losses do beyond the suite: preparations, options, splits over ranks and micro-batches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rollcast.contracts.algorithm import (
    Denominators,
    PolicyLossInputs,
    loss_aggregations,
    policy_losses,
    prepare_policy_loss,
)
from rollcast.contracts.engine import LossInputs
from rollcast.errors import ColumnError
from rollcast_algorithms import make_ppo_loss, token_mean, vanilla
from rollcast_algorithms.policy_losses import clip_cov, dro, kl_cov, sapo

OPTIONS = {
    "clip_cov": {"clip_cov_ratio": 0.2, "clip_cov_lb": 0.0, "clip_cov_ub": 9.0},
    "kl_cov": {"kl_cov_ratio": 0.2},
    "dro": {"dro_beta": 0.3},
}


def batch(rows: int = 28, width: int = 6) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(width) < torch.randint(0, width + 1, (rows, 1), generator=generator)
    old = -2 * torch.rand(rows, width, generator=generator, dtype=torch.float64) - 0.1
    return {
        "new": old + 0.2 * torch.randn(rows, width, generator=generator, dtype=torch.float64),
        "mask": mask.long(),
        "old_log_probs": old,
        "advantages": torch.randn(rows, width, generator=generator, dtype=torch.float64),
        "rollout_is_weights": torch.rand(rows, width, generator=generator, dtype=torch.float64),
    }


@pytest.mark.parametrize(
    "name", [name for name in policy_losses.names() if policy_losses.find(name).distribution == "rollcast-algorithms"]
)
@pytest.mark.parametrize("aggregation", loss_aggregations.names())
def test_ranks_and_micro_batches_give_the_loss_and_gradient_of_the_whole(name: str, aggregation: str) -> None:
    given = batch()
    loss = make_ppo_loss(
        policy_losses.get(name),
        loss_aggregations.get(aggregation),
        options=OPTIONS.get(name),
        use_rollout_is_weights=True,
    )
    given |= loss.prepare(given["old_log_probs"], given["advantages"], given["mask"])
    mask = given["mask"]
    counts = Denominators(float(mask.sum()), float(mask.any(-1).sum()), 6.0)
    found: list[tuple[Tensor, Tensor]] = []
    for ranks in (1, 2, 4):
        for micro_batches in (1, 2, 7):
            leaf = given["new"].clone().requires_grad_()
            total = torch.zeros((), dtype=torch.float64)
            for rows in torch.arange(len(mask)).chunk(ranks):
                for piece in rows.chunk(micro_batches):
                    columns = {key: column[piece] for key, column in given.items() if key not in ("new", "mask")}
                    share = loss(LossInputs(leaf[piece], None, None, mask[piece], columns, counts)).loss
                    share.backward()  # type: ignore[no-untyped-call]
                    total += share.detach()
            assert leaf.grad is not None
            found.append((total, leaf.grad))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-9, atol=1e-12)


def covariant(advantages: list[float], log_probs: list[float], **options: float) -> PolicyLossInputs:
    old = torch.tensor([log_probs])
    return PolicyLossInputs(old, old, torch.tensor([advantages]), torch.ones_like(old), options=options)


def test_clip_cov_draws_the_share_of_tokens_that_it_is_told_to() -> None:
    generator = torch.Generator().manual_seed(0)
    old, advantages = torch.randn(40, 50, generator=generator), torch.randn(40, 50, generator=generator)
    bounds = {"clip_cov_lb": 0.1, "clip_cov_ub": 2.0}
    inputs = PolicyLossInputs(old, old, advantages, torch.ones(40, 50), options={"clip_cov_ratio": 0.05, **bounds})
    dropped = prepare_policy_loss(clip_cov, inputs)["dropped"] == 1
    covariance = (advantages - advantages.mean()) * (old - old.mean())
    assert dropped.sum() == 100
    assert ((covariance[dropped] > 0.1) & (covariance[dropped] < 2.0)).all()
    # The draw is not just the first or the largest of those that could be.
    assert 300 < dropped.nonzero()[:, 0].float().mean() * 20 < 480
    # Another batch gives another draw, and the same tokens are drawn in another order of the rows.
    order = torch.randperm(40, generator=generator)
    moved = replace(inputs, log_probs=old[order], old_log_probs=old[order], advantages=advantages[order])
    assert torch.equal(prepare_policy_loss(clip_cov, moved)["dropped"] == 1, dropped[order])
    everything = replace(inputs, options={"clip_cov_ratio": 1.0, **bounds})
    could = prepare_policy_loss(clip_cov, everything)["dropped"] == 1
    assert could.sum() > 500
    assert (could | ~dropped).all()


def test_clip_cov_drops_nobody_outside_its_bounds() -> None:
    inputs = covariant([1.0, -1.0], [-1.0, -2.0], clip_cov_lb=1.0)
    assert prepare_policy_loss(clip_cov, inputs)["dropped"].sum() == 0


def test_kl_cov_penalises_at_least_one_token_and_none_of_an_empty_batch() -> None:
    inputs = covariant([1.0, -1.0, 0.0], [-1.0, -2.0, -1.5])
    assert prepare_policy_loss(kl_cov, inputs)["penalised"].sum() == 1
    empty = replace(inputs, response_mask=torch.zeros(1, 3))
    assert prepare_policy_loss(kl_cov, empty)["penalised"].sum() == 0
    assert prepare_policy_loss(clip_cov, empty)["dropped"].sum() == 0


@pytest.mark.parametrize(("loss", "column"), [(clip_cov, "dropped"), (kl_cov, "penalised")])
def test_a_loss_of_the_whole_batch_refuses_to_guess(loss: object, column: str) -> None:
    assert callable(loss)
    inputs = covariant([1.0], [-1.0])
    with pytest.raises(ValueError, match=f"needs the prepared column '{column}'"):
        loss(inputs)
    with pytest.raises(ValueError, match=rf"prepared '{column}' is \[1, 2\], but the mask is \[1, 1\]"):
        loss(replace(inputs, prepared={column: torch.zeros(1, 2)}))


def test_options_that_mean_nothing_are_refused() -> None:
    inputs = covariant([1.0], [-1.0])
    with pytest.raises(ValueError, match=r"tau_pos and tau_neg must be greater than 0, got 0\.0 and 1\.05"):
        sapo(replace(inputs, options={"tau_pos": 0}))
    with pytest.raises(ValueError, match=r"dro needs dro_beta.*actor\.policy_loss_kwargs\.dro_beta"):
        dro(inputs)
    with pytest.raises(ValueError, match="clip_cov_ratio must be greater than 0, got 0"):
        prepare_policy_loss(clip_cov, replace(inputs, options={"clip_cov_ratio": 0}))


def test_importance_weights_multiply_the_policy_loss_and_get_no_gradient() -> None:
    given = batch()
    mask = given["mask"]
    counts = Denominators(float(mask.sum()), 1.0, 1.0)
    columns = {name: given[name] for name in ("old_log_probs", "advantages")}
    weights = given["rollout_is_weights"].requires_grad_()
    inputs = LossInputs(given["new"].requires_grad_(), None, None, mask, columns, counts)
    plain = make_ppo_loss(vanilla, token_mean)
    weighted = make_ppo_loss(vanilla, token_mean, use_rollout_is_weights=True)
    twice = weighted(replace(inputs, columns={**columns, "rollout_is_weights": torch.full_like(weights, 2.0)}))
    torch.testing.assert_close(twice.loss, 2 * plain(inputs).loss)
    weighted(replace(inputs, columns={**columns, "rollout_is_weights": weights})).loss.backward()  # type: ignore[no-untyped-call]
    assert weights.grad is None
    with pytest.raises(ColumnError, match="needs the column 'rollout_is_weights'"):
        weighted(inputs)


def test_most_losses_prepare_nothing() -> None:
    given = batch()
    tensors = (given["old_log_probs"], given["advantages"], given["mask"])
    assert make_ppo_loss(vanilla, token_mean).prepare(*tensors) == {}
    assert set(make_ppo_loss(kl_cov, token_mean).prepare(*tensors)) == {"policy_loss/penalised"}
