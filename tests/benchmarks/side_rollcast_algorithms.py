"""rollcast's side of bench_verl_algorithms.py: ``python side_rollcast_algorithms.py CASES RESULTS``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from _algorithm_cases import REJECTIONS, WEIGHTS, large_batch
from _side import serve
from torch import Tensor

from rollcast.contracts.algorithm import (
    AdvantageInputs,
    Denominators,
    PolicyLossInputs,
    advantages,
    kl_penalties,
    loss_aggregations,
    policy_losses,
    prepare_policy_loss,
)
from rollcast.protocol import Jagged
from rollcast_algorithms import RolloutCorrectionConfig, clipped_value_loss, correct_rollout, entropy
from rollcast_algorithms.kl_controllers import KlControllerSettings, kl_controllers

Case = dict[str, Any]
Found = dict[str, Tensor]

OPTIONS = {
    "clip_cov": {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.1, "clip_cov_ub": 1.0},
    "kl_cov": {"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.5},
    "dro": {"dro_beta": 0.3},
    "sapo": {"tau_pos": 1.0, "tau_neg": 1.05},
}


def advantage(name: str, case: Case) -> Found:
    mask = case["dense"] if name == "optimal_token_baseline" else case["mask"]
    options = {"gdpo": {"gdpo_reward_keys": list(case["components"]), "gdpo_reward_weights": case["weights"]}}
    out = advantages.get(name)(
        AdvantageInputs(
            token_level_rewards=case["rewards"] * mask,
            response_mask=mask,
            group_ids=case["full_groups"] if name == "grpo_passk" else case["groups"],
            gamma=case["gamma"],
            lam=case["lam"],
            norm_adv_by_std_in_grpo=case["by_std"],
            options=options.get(name, {}),
            columns={
                "values": case["values"],
                "old_log_probs": case["old"],
                "sum_pi_squared": case["sum_pi_squared"],
                "reward_baselines": case["baselines"],
                "rollout_is_weights": case["is_weights"],
                **{f"reward_component/{key}": column for key, column in case["components"].items()},
            },
        )
    )
    return {"advantages": out.advantages[mask == 1], "returns": out.returns[mask == 1]}


def counts(case: Case) -> Denominators:
    mask = case["mask"]
    return Denominators(float(mask.sum()), float(mask.any(-1).sum()), float(mask.shape[1]))


def policy_loss(name: str, case: Case) -> Found:
    new = case["new"].clone().requires_grad_()
    low, high, dual = case["clip"]
    inputs = PolicyLossInputs(
        new, case["old"], case["advantages"], case["mask"], low, high, dual, OPTIONS.get(name, {})
    )
    loss = policy_losses.get(name)
    # verl measures the covariances at the new log-probs.
    out = loss(replace(inputs, prepared=prepare_policy_loss(loss, inputs)))
    fixed = {"sapo": "seq-mean-token-mean", "geo_mean": "seq-mean-token-mean"}
    total = loss_aggregations.get(fixed.get(name, case["aggregation"]))(out.losses, case["mask"], counts(case))
    (gradient,) = torch.autograd.grad(total, new)
    return {"loss": total.detach(), "gradient": gradient[case["mask"] == 1]}


def kl(name: str, case: Case) -> Found:
    new = case["new"].clone().requires_grad_()
    value = kl_penalties.get(name)(new, case["ref"])
    (gradient,) = torch.autograd.grad(value.sum(), new)
    return {"value": value.detach(), "gradient": gradient}


def aggregation(name: str, case: Case) -> Found:
    return {"loss": loss_aggregations.get(name)(case["values"], case["mask"], counts(case))}


def value_loss(case: Case) -> Found:
    new = (case["values"] + case["new"]).requires_grad_()
    out = clipped_value_loss(new, case["values"], case["returns"], case["mask"], 0.5)
    total = loss_aggregations.get(case["aggregation"])(out.losses, case["mask"], counts(case))
    (gradient,) = torch.autograd.grad(total, new)
    share = out.metrics["vf_clipfrac"].sum() / case["mask"].sum()
    return {"loss": total.detach(), "gradient": gradient[case["mask"] == 1], "clipfrac": share}


def controller(name: str, case: Case) -> Found:
    made = kl_controllers.get(name)(KlControllerSettings(0.2, 0.1, 100))
    found = []
    for kl_of_row in case["returns"][0].abs().tolist():
        made.update(kl_of_row, len(case["mask"]))
        found.append(made.value)
    return {"values": torch.tensor(found)}


def correction(case: Case, **keys: Any) -> Found:
    every = torch.ones_like(case["mask"])
    old, rollout, mask = (Jagged.from_padded(case[name], every) for name in ("old", "rollout", "mask"))
    out = correct_rollout(old, rollout, mask, RolloutCorrectionConfig(**keys))
    found = {
        "mask": out.response_mask.pad(),
        "kl": out.metrics["rollout_corr/kl"],
        "k3": out.metrics["rollout_corr/k3_kl"],
    }
    return {name: torch.as_tensor(value) for name, value in found.items()} | (
        {} if out.weights is None else {"weights": out.weights.pad()}
    )


def functions() -> dict[str, Callable[[Case], Found]]:
    """Of each name: what is compared."""
    found: dict[str, Callable[[Case], Found]] = {}
    for name in advantages.names():
        found[f"advantage {name}"] = partial(advantage, name)
    for name in policy_losses.names():
        found[f"policy loss {name}"] = partial(policy_loss, name)
    for name in kl_penalties.names():
        found[f"KL {name}"] = partial(kl, name)
    for name in loss_aggregations.names():
        found[f"aggregation {name}"] = partial(aggregation, name)
    for name in kl_controllers.names():
        found[f"KL controller {name}"] = partial(controller, name)
    for level, threshold, normalise in WEIGHTS:
        key = f"weights {level} {threshold}{' normalised' if normalise else ''}"
        keys = {"rollout_is": level, "rollout_is_threshold": threshold, "rollout_is_batch_normalize": normalise}
        found[key] = partial(correction, **keys)
    for rules, threshold in REJECTIONS:
        found[f"rejection {rules}"] = partial(correction, rollout_rs=rules, rollout_rs_threshold=threshold)
    found["value loss"] = value_loss
    found["entropy"] = lambda case: {"entropy": entropy(case["logits"])}
    for name in ("KL full", "advantage gae_turn", "advantage gigpo"):  # verl has none
        del found[name]
    del found["policy loss topr"]
    return found


def timed(actions: dict[str, Callable[[], Any]]) -> None:
    """Add the actions that are timed."""
    batch = large_batch()
    inputs = AdvantageInputs(batch["rewards"], batch["mask"], batch["groups"])
    for name in ("grpo", "rloo", "reinforce_plus_plus_baseline", "opo"):
        actions[name] = partial(advantages.get(name), inputs)
    # The least that an estimator does: read the rewards, and write a new tensor of their size.
    actions["pass"] = batch["rewards"].clone


def main() -> None:
    """Serve."""
    cases, results = sys.argv[1:]

    def parity() -> None:
        drawn = torch.load(cases)
        torch.save({name: [function(case) for case in drawn] for name, function in functions().items()}, results)

    actions: dict[str, Callable[[], Any]] = {"parity": parity}
    timed(actions)
    serve(actions)


if __name__ == "__main__":
    main()
