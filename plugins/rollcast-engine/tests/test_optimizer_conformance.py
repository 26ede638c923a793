"""The optimizers pass the suite that third parties are given."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from rollcast.contracts.engine import OptimConfig
from rollcast_engine.optim import optimizers
from rollcast_engine.testing import OptimizerSuite
from rollcast_testing import CommandSuite


class TestAdamw(OptimizerSuite):
    name = "adamw"

    def reference(self, parameters: Sequence[Parameter], optim: OptimConfig, lr: float) -> Optimizer:
        betas = (optim.betas[0], optim.betas[1])
        return torch.optim.AdamW(
            parameters, lr=lr, betas=betas, eps=optim.eps, weight_decay=optim.weight_decay, foreach=False
        )


class TestAmsgrad(TestAdamw):
    """AdamW with an option, whose state torch allocates at the first step."""

    optim: ClassVar[Mapping[str, Any]] = {"lr": 1e-2, "weight_decay": 0.1, "optimizer_kwargs": {"amsgrad": True}}

    def reference(self, parameters: Sequence[Parameter], optim: OptimConfig, lr: float) -> Optimizer:
        return torch.optim.AdamW(parameters, lr=lr, weight_decay=optim.weight_decay, amsgrad=True, foreach=False)


class TestSgd(OptimizerSuite):
    name = "sgd"
    optim: ClassVar[Mapping[str, Any]] = {"lr": 1e-2, "weight_decay": 0.1, "optimizer_kwargs": {"momentum": 0.9}}

    def reference(self, parameters: Sequence[Parameter], optim: OptimConfig, lr: float) -> Optimizer:
        return torch.optim.SGD(parameters, lr=lr, weight_decay=optim.weight_decay, momentum=0.9, foreach=False)


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
class TestAdamw8bit(TestAdamw):
    """torchao keeps the moments of small parameters, as these are, in float32; a larger one is in test_engine_optim."""

    name = "adamw_8bit"


def test_every_optimizer_of_this_distribution_is_tested_here() -> None:
    ours = {name for name in optimizers.names() if optimizers.find(name).distribution == "rollcast-engine"}
    assert ours == {"adamw", "adamw_8bit", "sgd"}


class TestExportCommand(CommandSuite):
    name = "export"
