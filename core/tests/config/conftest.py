"""A small plugin with a trainer, a recipe and a schema, so that these tests need the core only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollcast.plugins import discovery

SCHEMAS = '''
    from dataclasses import field
    from typing import Annotated, Any, Literal

    from rollcast.contracts.config import Fraction, Gt, Hosts, Len, OrInfinity, Positive, PositiveOrOff, config

    @config
    class Inner:
        rate: float = 0.5
        share: Fraction = 1.0
        betas: Annotated[list[float], Len(2, 2)] = field(default_factory=lambda: [0.9, 0.999])

    @config
    class Learner:
        path: str = "???"
        inner: Inner = field(default_factory=Inner)
        limit: int | None = None
        quick: bool = False
        cap: Annotated[float, Gt(0), OrInfinity()] | None = None
        not_in_the_file: int = 7
        """A key that
        no file sets."""
        mode: Literal["eager", "lazy"] = "eager"
        unit: Annotated[dict[str, Any], Hosts("tp_unit")] = field(default_factory=dict)

    @config
    class TrainerKeys:
        name: str = "tp_trainer"
        seed: int = 0
        note: str = ""
        save_freq: PositiveOrOff = -1

    @config
    class RewardKeys:
        name: str = "tp_reward"
        reward_kwargs: dict[str, Any] = field(default_factory=dict)

    @config
    class Critic:
        unit: Annotated[dict[str, Any], Hosts("tp_unit", like="learner.unit")] = field(default_factory=dict)

    @config
    class Run:
        """Every section of the trainer, in one schema."""

        learner: Learner = field(default_factory=Learner)
        critic: Critic = field(default_factory=Critic)
        trainer: TrainerKeys = field(default_factory=TrainerKeys)
        reward: RewardKeys = field(default_factory=RewardKeys)

    @config
    class RoundUnit:
        name: str = "round"
        size: Positive = 1
        radius: float = 0.5

    @config
    class SquareUnit:
        name: str = "square"
        size: Positive = 2
        side: float = 0.25
'''
CONF = """
    from rollcast.contracts.config import ConfigSchema
    from tp_task.schemas import RoundUnit, Run, SquareUnit

    SCHEMAS = (
        ConfigSchema(path="", schema=Run, group="trainer", option="tp_trainer"),
        ConfigSchema(schema=RoundUnit, group="tp_unit", option="round"),
        ConfigSchema(schema=SquareUnit, group="tp_unit", option="square"),
    )
"""
TRAINER = """\
    # @package _global_
    defaults:
      - /tp_engine: small
      - /tp_unit: round
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
            "tp_task/conf/tp_unit/round.yaml": "# @package learner.unit\nname: round\n",
            "tp_task/conf/tp_unit/square.yaml": "# @package learner.unit\nname: square\n",
            "tp_task/conf/recipe/tp_recipe.yaml": RECIPE,
        },
        version="2.5",
    )
