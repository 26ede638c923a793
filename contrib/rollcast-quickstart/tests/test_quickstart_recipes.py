from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from rollcast.config import compose
from rollcast.contracts.config import flatten


def settings(recipe: str) -> dict[str, Any]:
    return flatten(OmegaConf.to_container(compose([f"recipe={recipe}", "run_dir=runs/here"]).config))


@pytest.mark.parametrize(
    ("recipe", "changes"),
    [
        (
            "quickstart_remax",
            {
                "algorithm.adv_estimator": "remax",
                "data.train_batch_size": 512,
                "rollout.n": 1,
                "rollout.temperature": 0.6,
                "actor.ppo_mini_batch_size": 256,
            },
        ),
        ("quickstart_lora", {"model.lora_rank": 32, "model.lora_alpha": 32, "actor.optim.lr": 2e-3}),
        (
            "quickstart_ppo",
            {
                "algorithm.adv_estimator": "gae",
                "actor.ppo_epochs": 2,
                "critic.optim.lr": 1e-3,
                "trainer.total_steps": 80,
            },
        ),
    ],
)
def test_other_algorithms_are_the_quick_start_but_for_a_few_keys(recipe: str, changes: dict[str, Any]) -> None:
    base, other = settings("quickstart"), settings(recipe)
    assert {key: value for key, value in other.items() if base.get(key) != value} == changes
    assert base.keys() == other.keys()


def test_as_many_samples_a_step_and_an_update() -> None:
    base, other = settings("quickstart"), settings("quickstart_remax")
    for key in ("data.train_batch_size", "actor.ppo_mini_batch_size"):
        assert base[key] * base["rollout.n"] == other[key] * other["rollout.n"]


def test_the_quick_start_on_megatron_is_the_quick_start_on_another_engine() -> None:
    pytest.importorskip("rollcast_megatron")
    base, other = settings("quickstart"), settings("quickstart_megatron")
    changes = {key: value for key, value in other.items() if base.get(key, value) != value}
    engines = dict.fromkeys((f"{role}.engine.name" for role in ("actor", "critic", "ref", "reward_model")), "megatron")
    assert changes == {**engines, "placement.n_gpus_per_node": 2}
    assert other["actor.engine.tensor_model_parallel_size"] == 2
    assert all(".engine." in key for key in base.keys() ^ other.keys())


def test_the_quick_start_takes_another_engine() -> None:
    pytest.importorskip("rollcast_megatron")
    assert settings("quickstart")["actor.engine.share_prompts"] is True
    composed = compose(["recipe=quickstart", "engine=megatron"])
    assert composed.config.actor.engine.name == "megatron"
    assert "share_prompts" not in composed.config.actor.engine


@pytest.mark.parametrize("recipe", ["quickstart", "quickstart_lora", "quickstart_ppo"])
def test_the_warm_up_stops_when_samples_drawn_as_in_training_earn_rewards(recipe: str) -> None:
    """Greedy answers may be right long before samples are, and GRPO has nothing to learn from then."""
    training = settings(recipe)
    warm_up = settings(training["trainer.warm_start"])
    assert warm_up["trainer.stop_at.metric"] == "val/reward"
    assert warm_up["trainer.stop_at.value"] > 0
    for key in ("temperature", "top_p", "top_k"):
        assert warm_up[f"rollout.val_kwargs.{key}"] == training[f"rollout.{key}"]
    # Rows that the accuracy is later measured on have no say in it.
    assert not set(warm_up["data.val_files"]) & set(training["data.val_files"])
