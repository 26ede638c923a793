"""verl's estimators and losses under rollcast's names give verl's numbers, and those of rollcast's own."""

from __future__ import annotations

import dataclasses
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rollcast.contracts.algorithm import (
    AdvantageInputs,
    Denominators,
    PolicyLossInputs,
    advantages,
    loss_aggregations,
    needs_of,
    policy_losses,
    prepare_policy_loss,
)
from rollcast.errors import CapabilityError, ConfigError, PluginNotFoundError, PluginTypeError
from rollcast_verl import algorithms

ROWS, WIDTH = 12, 7
LOSS_OPTIONS = {
    "clip_cov": {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.1, "clip_cov_ub": 1.0},
    "kl_cov": {"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.5},
    "dro": {"dro_beta": 0.3},
    "sapo": {"tau_pos": 1.0, "tau_neg": 1.05},
}


@pytest.fixture(scope="module")
def theirs() -> ModuleType:
    return pytest.importorskip("verl.trainer.ppo.core_algos")


@pytest.fixture
def batch() -> dict[str, Tensor]:
    torch.manual_seed(5)
    lengths = torch.randint(1, WIDTH + 1, (ROWS,))
    mask = (torch.arange(WIDTH) < lengths.unsqueeze(-1)).long()
    mask[:, 2] *= torch.tensor([0, 1]).repeat(ROWS // 2)  # a token that the policy did not choose
    mask[:, 0] = 1
    old = -torch.rand(ROWS, WIDTH)
    return {
        "mask": mask,
        "rewards": torch.randn(ROWS, WIDTH) * mask,
        "groups": torch.arange(ROWS) // 4,
        "values": torch.randn(ROWS, WIDTH),
        "old": old,
        "new": -torch.rand(ROWS, WIDTH),
        "advantages": torch.randn(ROWS, WIDTH) * mask,
        "sum_pi_squared": (2 * old).exp() + 0.1 * torch.rand(ROWS, WIDTH),
        "weights": torch.rand(ROWS, WIDTH) + 0.5,
        "baselines": torch.randn(ROWS),
        "exact": torch.randn(ROWS),
        "form": torch.randn(ROWS),
    }


def inputs_of(name: str, batch: dict[str, Tensor]) -> AdvantageInputs:
    columns = {
        "values": batch["values"],
        "old_log_probs": batch["old"],
        "sum_pi_squared": batch["sum_pi_squared"],
        "rollout_is_weights": batch["weights"],
        "reward_baselines": batch["baselines"],
        "reward_component/exact": batch["exact"],
        "reward_component/form": batch["form"],
    }
    keys = {"gdpo_reward_keys": ["exact", "form"], "gdpo_reward_weights": [1.0, 0.5]}
    mask = batch["mask"]
    if name.endswith("optimal_token_baseline"):
        mask = torch.ones_like(mask)
    return AdvantageInputs(
        token_level_rewards=batch["rewards"],
        response_mask=mask,
        group_ids=batch["groups"],
        gamma=0.95,
        lam=0.9,
        options=keys if name == "gdpo" else {},
        columns=needs_of(advantages.get(f"verl_{name}")).select(columns),
    )


@pytest.mark.parametrize("name", sorted(algorithms.ESTIMATORS))
def test_an_estimator_of_verl_gives_the_numbers_of_our_own(
    name: str, theirs: ModuleType, batch: dict[str, Tensor]
) -> None:
    given = inputs_of(name, batch)
    found = advantages.get(f"verl_{name}")(given)
    ours = advantages.get(name.removesuffix("_vectorized"))(given)
    assert found.advantages.dtype == torch.float32
    torch.testing.assert_close(found.advantages, ours.advantages, atol=2e-6, rtol=1e-5)
    chosen = given.response_mask != 0
    assert not found.advantages[~chosen].any() and not found.returns[~chosen].any()
    torch.testing.assert_close(found.returns[chosen], ours.returns[chosen], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "reinforce_plus_plus_baseline"])
def test_an_estimator_passes_on_what_verl_computes(name: str, theirs: ModuleType, batch: dict[str, Tensor]) -> None:
    from omegaconf import OmegaConf

    given = inputs_of(name, batch)
    expected, _ = theirs.get_adv_estimator_fn(name)(
        token_level_rewards=given.token_level_rewards,
        response_mask=given.response_mask.float(),
        index=given.group_ids.numpy(),
        config=OmegaConf.create({"norm_adv_by_std_in_grpo": True}),
    )
    chosen = given.response_mask != 0
    found = advantages.get(f"verl_{name}")(given).advantages
    torch.testing.assert_close(found[chosen], expected[chosen].float(), atol=1e-6, rtol=0)


def test_every_estimator_and_loss_of_verl_has_a_name_here(theirs: ModuleType) -> None:
    assert {str(getattr(name, "value", name)) for name in theirs.ADV_ESTIMATOR_REGISTRY} == set(algorithms.ESTIMATORS)
    assert set(theirs.POLICY_LOSS_REGISTRY) == set(algorithms.LOSSES)
    assert {f"verl_{name}" for name in algorithms.ESTIMATORS} <= set(advantages.names())
    assert {f"verl_{name}" for name in algorithms.LOSSES} <= set(policy_losses.names())


def loss_inputs(name: str, batch: dict[str, Tensor]) -> PolicyLossInputs:
    new = batch["new"].clone().requires_grad_()
    options = LOSS_OPTIONS.get(name, {})
    return PolicyLossInputs(new, batch["old"], batch["advantages"], batch["mask"], 0.2, 0.3, 2.5, options)


def total(losses: Tensor, mask: Tensor, aggregation: str = "token-mean") -> Tensor:
    counts = Denominators(float(mask.sum()), float(mask.any(-1).sum()), float(mask.shape[1]))
    return loss_aggregations.get(aggregation)(losses, mask, counts)


@pytest.mark.parametrize("name", sorted(set(algorithms.LOSSES) - {"bypass_mode"}))
def test_a_loss_of_verl_gives_verls_number_and_gradient(
    name: str, theirs: ModuleType, batch: dict[str, Tensor]
) -> None:
    given = loss_inputs(name, batch)
    fixed = "seq-mean-token-mean" if name in ("sapo", "geo_mean") else "token-mean"
    found = total(policy_losses.get(f"verl_{name}")(given).losses, batch["mask"], fixed)
    (gradient,) = torch.autograd.grad(found, given.log_probs)
    new = batch["new"].clone().requires_grad_()
    expected, _ = theirs.get_policy_loss_fn(name)(
        old_log_prob=batch["old"],
        log_prob=new,
        advantages=batch["advantages"],
        response_mask=batch["mask"].float(),
        loss_agg_mode="token-mean",
        config=algorithms._actor_config(name, given),
    )
    (reference,) = torch.autograd.grad(expected, new)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    chosen = batch["mask"] != 0
    torch.testing.assert_close(gradient[chosen], reference[chosen], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["vanilla", "gspo", "cispo", "dppo_tv", "dro"])
def test_a_loss_of_verl_gives_the_numbers_of_our_own(name: str, theirs: ModuleType, batch: dict[str, Tensor]) -> None:
    given = loss_inputs(name, batch)
    own = policy_losses.get(name)
    ours = own(dataclasses.replace(given, prepared=prepare_policy_loss(own, given))).losses
    found = policy_losses.get(f"verl_{name}")(given)
    torch.testing.assert_close(total(found.losses, batch["mask"]), total(ours, batch["mask"]), atol=1e-6, rtol=1e-5)
    assert not any(name.startswith("actor/") for name in found.metrics)
    assert all(metric.shape == batch["mask"].shape for metric in found.metrics.values())


@pytest.mark.parametrize("seed", range(5))
def test_icepop_gives_verls_number_and_gradient(seed: int, theirs: ModuleType, batch: dict[str, Tensor]) -> None:
    torch.manual_seed(seed)
    batch |= {"new": batch["old"] + torch.randn(ROWS, WIDTH), "advantages": torch.randn(ROWS, WIDTH)}
    bounds = {"threshold_lower": 0.5, "threshold": 2.0}
    given = dataclasses.replace(loss_inputs("icepop", batch), options=bounds)
    output = policy_losses.get("icepop")(given)
    found = total(output.losses, batch["mask"])
    (gradient,) = torch.autograd.grad(found, given.log_probs)
    new = batch["new"].clone().requires_grad_()
    correction = {"loss_type": "reinforce", "rollout_is": "token", "rollout_is_threshold": "0.5_2.0"}
    expected, metrics = theirs.get_policy_loss_fn("bypass_mode")(
        old_log_prob=batch["old"],
        log_prob=new,
        advantages=batch["advantages"],
        response_mask=batch["mask"].float(),
        loss_agg_mode="token-mean",
        config=SimpleNamespace(policy_loss={"rollout_correction": correction}, global_batch_info={}),
    )
    (reference,) = torch.autograd.grad(expected, new)
    chosen = batch["mask"] != 0
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(gradient[chosen], reference[chosen], atol=1e-7, rtol=1e-6)
    clipped = output.metrics["clip_fraction"][chosen].mean()
    assert float(clipped) == pytest.approx(metrics["rollout_corr/rollout_is_oob_ratio"]) and 0.1 < clipped < 0.9


def test_the_aggregation_of_verl_is_put_back(theirs: ModuleType, batch: dict[str, Tensor]) -> None:
    before = theirs.agg_loss
    policy_losses.get("verl_vanilla")(loss_inputs("vanilla", batch))
    assert theirs.agg_loss is before


def test_an_option_that_verl_does_not_have_is_refused(theirs: ModuleType, batch: dict[str, Tensor]) -> None:
    given = dataclasses.replace(loss_inputs("vanilla", batch), options={"clip_cow": 1.0})
    with pytest.raises(ConfigError, match=r"actor\.policy_loss_kwargs has clip_cow.*clip_cov_lb"):
        policy_losses.get("verl_vanilla")(given)


def test_functions_of_a_user_are_adapted(theirs: ModuleType, batch: dict[str, Tensor]) -> None:
    @theirs.register_adv_est("half_of_values")
    def half(
        token_level_rewards: Tensor, response_mask: Tensor, values: Tensor, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return values / 2, values

    @theirs.register_policy_loss("twice")
    def twice(old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor, **kwargs: Any) -> Any:
        losses = -2 * log_prob * advantages
        return theirs.agg_loss(loss_mat=losses, loss_mask=response_mask, loss_agg_mode="token-mean"), {}

    @theirs.register_policy_loss("one_number")
    def one_number(log_prob: Tensor, **kwargs: Any) -> Any:
        return log_prob.mean(), {}

    @theirs.register_policy_loss("two_numbers")
    def two_numbers(log_prob: Tensor, response_mask: Tensor, **kwargs: Any) -> Any:
        return sum(theirs.agg_loss(log_prob, response_mask, "token-mean") for _ in range(2)), {}

    try:
        mine = algorithms.estimator("half_of_values", needs={"values"})
        given = dataclasses.replace(inputs_of("gae", batch))
        chosen = batch["mask"] != 0
        torch.testing.assert_close(mine(given).advantages[chosen], batch["values"][chosen] / 2)
        losses = algorithms.policy_loss("twice")(loss_inputs("vanilla", batch)).losses
        torch.testing.assert_close(losses, (-2 * batch["new"] * batch["advantages"]) * batch["mask"])
        found = algorithms.policy_loss("one_number")(loss_inputs("vanilla", batch)).losses
        torch.testing.assert_close(total(found, batch["mask"]), batch["new"].mean())
        with pytest.raises(PluginTypeError, match="agg_loss 2 times"):
            algorithms.policy_loss("two_numbers")(loss_inputs("vanilla", batch))
        with pytest.raises(PluginNotFoundError, match=r"verl has no .thirds.*half_of_values"):
            algorithms.estimator("thirds")(given)
    finally:
        del theirs.ADV_ESTIMATOR_REGISTRY["half_of_values"]
        del theirs.POLICY_LOSS_REGISTRY["twice"], theirs.POLICY_LOSS_REGISTRY["one_number"]
        del theirs.POLICY_LOSS_REGISTRY["two_numbers"]


def test_without_verl_the_error_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, batch: dict[str, Tensor]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "verl.trainer.ppo.core_algos", None)
    with pytest.raises(CapabilityError, match=r"the estimator verl_grpo.*pip install"):
        advantages.get("verl_grpo")(inputs_of("grpo", batch))
