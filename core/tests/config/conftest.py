"""A small plugin with a trainer, a recipe and a schema, so that these tests need the core only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollcast.plugins import discovery

SCHEMAS = """
    from dataclasses import dataclass, field
    from typing import Any

    @dataclass
    class Inner:
        rate: float = 0.5
        betas: list[float] = field(default_factory=lambda: [0.9, 0.999])

    @dataclass
    class Learner:
        path: str = "???"
        inner: Inner = field(default_factory=Inner)
        limit: int | None = None
        quick: bool = False
        not_in_the_file: int = 7

    @dataclass
    class TrainerKeys:
        name: str = "tp_trainer"
        seed: int = 0
        note: str = ""

    @dataclass
    class RewardKeys:
        name: str = "tp_reward"
        reward_kwargs: dict[str, Any] = field(default_factory=dict)
"""
CONF = """
    from rollcast.config.schemas import ConfigSchema
    from tp_task.schemas import Learner, RewardKeys, TrainerKeys

    SCHEMAS = (
        ConfigSchema(path="learner", schema=Learner, group="trainer", option="tp_trainer"),
        ConfigSchema(path="trainer", schema=TrainerKeys, group="trainer", option="tp_trainer"),
        ConfigSchema(path="reward", schema=RewardKeys, group="trainer", option="tp_trainer"),
    )
"""
TRAINER = """\
    # @package _global_
    defaults:
      - /tp_engine: small
      - _self_

    learner:
      path: ???
      inner:
        rate: 0.25
        betas: [0.9, 0.95]
      limit: null
      quick: false
    trainer:
      name: tp_trainer
      seed: 0
      note: ""
    reward:
      name: tp_reward
      reward_kwargs: {}
"""
ENGINE = """\
    # @package learner
    quick: true
"""
RECIPE = """\
    # @package _global_
    defaults:
      - override /trainer: tp_trainer

    run_dir: runs/tp
    learner:
      path: ${run_dir}/model
      limit: 3
    trainer:
      seed: 11
"""
CODE = """
    from rollcast.contracts.trainer import BaseTrainer

    class Trainer(BaseTrainer):
        @classmethod
        def launch(cls, config):
            raise NotImplementedError

    def reward(sample):
        return 1.0
"""


@pytest.fixture(autouse=True)
def forgotten_modules() -> Iterator[None]:
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("tp_"):
            del sys.modules[name]
    discovery.refresh()


@pytest.fixture(autouse=True)
def task_plugin(make_dist: Callable[..., Path]) -> Path:
    return make_dist(
        "tp-task",
        {
            "rollcast.configs": {"tp_task": "tp_task.conf"},
            "rollcast.trainers": {"tp_trainer": "tp_task.code:Trainer"},
            "rollcast.rewards": {"tp_reward": "tp_task.code:reward"},
        },
        {
            "tp_task/__init__.py": "",
            "tp_task/schemas.py": SCHEMAS,
            "tp_task/code.py": CODE,
            "tp_task/conf/__init__.py": CONF,
            "tp_task/conf/trainer/tp_trainer.yaml": TRAINER,
            "tp_task/conf/tp_engine/small.yaml": ENGINE,
            "tp_task/conf/tp_engine/large.yaml": ENGINE,
            "tp_task/conf/recipe/tp_recipe.yaml": RECIPE,
        },
        version="2.5",
    )
