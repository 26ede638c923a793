"""verl's side of bench_verl_algorithms.py, in verl's environment: the functions that its trainer calls."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from _algorithm_cases import AGGREGATIONS, REJECTIONS, WEIGHTS, large_batch
from _side import serve
from omegaconf import OmegaConf
from torch import Tensor
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
from verl.utils.torch_functional import entropy_from_logits
from verl.workers.config.actor import ActorConfig, PolicyLossConfig

Case = dict[str, Any]
Found = dict[str, Tensor]

ESTIMATORS = (
    "gae",
    "grpo",
    "grpo_passk",
    "gdpo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "rloo",
    "opo",
    "gpg",
    "optimal_token_baseline",
    "tir_optimal_token_baseline",
)
LOSSES = (
    "vanilla",
    "gspo",
    "sapo",
    "gpg",
    "clip_cov",
    "kl_cov",
    "geo_mean",
    "cispo",
    "dro",
    "dppo_tv",
    "dppo_kl",
)
PENALTIES = ("k1", "abs", "k2", "k3", "k1+", "abs+", "k2+", "k3+")


def advantage(name: str, case: Case) -> Found:
    mask = case["dense"] if name == "optimal_token_baseline" else case["mask"]
    config = OmegaConf.create(
        {
            "gamma": case["gamma"],
            "norm_adv_by_std_in_grpo": case["by_std"],
            "gdpo_reward_keys": list(case["components"]),
            "gdpo_reward_weights": case["weights"],
        }
    )
    groups = case["full_groups"] if name == "grpo_passk" else case["groups"]
    inputs: dict[str, Any] = {
        "token_level_rewards": case["rewards"] * mask,
        "response_mask": mask,
        "index": groups.numpy(),
        "config": config,
        "norm_adv_by_std_in_grpo": case["by_std"],
    }
    if name == "gae":
        inputs = {key: inputs[key] for key in ("token_level_rewards", "response_mask")}
        inputs |= {"values": case["values"], "gamma": case["gamma"], "lam": case["lam"]}
    elif name == "grpo":
        inputs.pop("config")
    elif name == "gdpo":
        inputs["non_tensor_batch"] = {key: part.numpy() for key, part in case["components"].items()}
        inputs["batch"] = {
            "prompts": torch.zeros(len(mask), 1),
            "attention_mask": torch.nn.functional.pad(mask, (1, 0)),
        }
    elif name == "remax":
        inputs["reward_baselines"] = case["baselines"]
    elif name.endswith("optimal_token_baseline"):
        for key in ("old_log_probs", "sum_pi_squared", "rollout_is_weights"):
            inputs[key] = case[{"old_log_probs": "old", "rollout_is_weights": "is_weights"}.get(key, key)]
    found, returns = core_algos.get_adv_estimator_fn(name)(**inputs)
    return {"advantages": found[mask == 1], "returns": returns[mask == 1]}


def policy_loss(name: str, case: Case) -> Found:
    low, high, dual = case["clip"]
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=low,
        clip_ratio_high=high,
        clip_ratio_c=dual,
        policy_loss=PolicyLossConfig(
            clip_cov_ratio=1.0, clip_cov_lb=0.1, clip_cov_ub=1.0, kl_cov_ratio=0.2, ppo_kl_coef=0.5, dro_beta=0.3
        ),
    )
    new = case["new"].clone().requires_grad_()
    loss, _ = core_algos.get_policy_loss_fn(name)(
        old_log_prob=case["old"],
        log_prob=new,
        advantages=case["advantages"],
        response_mask=case["mask"],
        loss_agg_mode=case["aggregation"],
        config=config,
    )
    (gradient,) = torch.autograd.grad(loss, new)
    return {"loss": loss.detach(), "gradient": gradient[case["mask"] == 1]}


def kl(name: str, case: Case) -> Found:
    new = case["new"].clone().requires_grad_()
    value = core_algos.kl_penalty(new, case["ref"], name)
    (gradient,) = torch.autograd.grad(value.sum(), new)
    return {"value": value.detach(), "gradient": gradient}


def aggregation(name: str, case: Case) -> Found:
    return {"loss": core_algos.agg_loss(case["values"], case["mask"], name)}


def value_loss(case: Case) -> Found:
    new = (case["values"] + case["new"]).requires_grad_()
    loss, share = core_algos.compute_value_loss(
        new, case["returns"], case["values"], case["mask"], 0.5, loss_agg_mode=case["aggregation"]
    )
    (gradient,) = torch.autograd.grad(loss, new)
    return {"loss": loss.detach(), "gradient": gradient[case["mask"] == 1], "clipfrac": share}


def controller(name: str, case: Case) -> Found:
    keys = {"type": name, "kl_coef": 0.2, "target_kl": 0.1, "horizon": 100}
    made = core_algos.get_kl_controller(OmegaConf.create(keys))
    found = []
    for kl_of_row in case["returns"][0].abs().tolist():
        made.update(kl_of_row, len(case["mask"]))
        found.append(float(made.value))
    return {"values": torch.tensor(found)}


def correction(case: Case, **keys: Any) -> Found:
    weights, mask, metrics = compute_rollout_correction_and_rejection_mask(
        case["old"], case["rollout"], case["mask"], **keys
    )
    found = {"mask": mask, "kl": metrics["rollout_corr/kl"], "k3": metrics["rollout_corr/k3_kl"]}
    return {name: torch.as_tensor(value) for name, value in found.items()} | (
        {} if weights is None else {"weights": weights.batch["rollout_is_weights"]}
    )


def functions() -> dict[str, Callable[[Case], Found]]:
    """Of each name: what is compared."""
    found: dict[str, Callable[[Case], Found]] = {}
    for name in ESTIMATORS:
        found[f"advantage {name}"] = partial(advantage, name)
    for name in LOSSES:
        found[f"policy loss {name}"] = partial(policy_loss, name)
    for name in PENALTIES:
        found[f"KL {name}"] = partial(kl, name)
    for name in AGGREGATIONS:
        found[f"aggregation {name}"] = partial(aggregation, name)
    for name in ("fixed", "adaptive"):
        found[f"KL controller {name}"] = partial(controller, name)
    for level, threshold, normalise in WEIGHTS:
        key = f"weights {level} {threshold}{' normalised' if normalise else ''}"
        keys = {"rollout_is": level, "rollout_is_threshold": threshold, "rollout_is_batch_normalize": normalise}
        found[key] = partial(correction, **keys)
    for rules, threshold in REJECTIONS:
        found[f"rejection {rules}"] = partial(correction, rollout_rs=rules, rollout_rs_threshold=threshold)
    found["value loss"] = value_loss
    found["entropy"] = lambda case: {"entropy": entropy_from_logits(case["logits"])}
    return found


def timed(actions: dict[str, Callable[[], Any]]) -> None:
    """Add the actions that are timed; rows of a prompt share a uuid, as in verl's trainer."""
    batch = large_batch()
    names = np.array([str(uuid.uuid4()) for _ in range(int(batch["groups"].max()) + 1)], dtype=object)
    inputs = {
        "token_level_rewards": batch["rewards"],
        "response_mask": batch["mask"],
        "index": names[batch["groups"].numpy()],
        "config": OmegaConf.create({"gamma": 1.0, "norm_adv_by_std_in_grpo": True}),
    }
    for name in ("grpo", "rloo", "reinforce_plus_plus_baseline", "opo", "grpo_vectorized", "rloo_vectorized"):
        actions[name] = partial(core_algos.get_adv_estimator_fn(name), **inputs)


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
