"""Helpers of the conformance tests of engines."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rollcast.contracts.engine import BaseEngine, ForwardSettings, LossFunction, OptimConfig, TrainOutput
from rollcast.protocol import DataProto
from rollcast_testing.checks import require
from rollcast_testing.tiny import nll_loss

__all__ = ["ALL_ROWS", "OPTIM", "infer", "require_equal", "require_mixture", "train", "weights"]

#: The large eps separates rounding from errors: some gradients (of the keys' biases) are almost zero, and with a small
#: eps Adam would turn their rounding errors into full steps.
OPTIM = OptimConfig(lr=1e-2, eps=1e-4, weight_decay=0.1, clip_grad=0.5)
ALL_ROWS = ForwardSettings()


def infer(engine: BaseEngine, data: DataProto, settings: ForwardSettings) -> DataProto:
    """Run inference in evaluation mode."""
    with engine.eval_mode():
        return engine.infer_batch(data, settings)[0]


def train(engine: BaseEngine, data: DataProto, chosen: ForwardSettings, loss: LossFunction = nll_loss) -> TrainOutput:
    """Take one optimizer step."""
    with engine.train_mode():
        return engine.train_batch(data, loss, chosen)


def weights(engine: BaseEngine) -> dict[str, Tensor]:
    """Return copies of all full parameters in host memory."""
    return {name: tensor.detach().cpu().clone() for name, tensor in engine.get_per_tensor_param()}


def require_equal(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: str) -> None:
    """Check that tensors are equal to the last bit.

    Raises:
        AssertionError: they are not equal; names some that differ.
    """
    __tracebackhide__ = True
    require(actual.keys() == expected.keys(), f"{what}: {sorted(actual)} are {sorted(expected)}")
    different = [name for name, tensor in expected.items() if not torch.equal(actual[name], tensor)]
    require(not different, f"{what} are the same to the last bit; {different[:3]} differ")


def require_mixture(
    actual: Mapping[str, Tensor], before: Mapping[str, Tensor], source: Mapping[str, Tensor], share: float
) -> None:
    """Check that weights are ``(1 - share) · before + share · source``.

    Raises:
        AssertionError: they are not; names some that differ.
    """
    __tracebackhide__ = True
    require(actual.keys() == before.keys(), f"mixed weights: {sorted(actual)} are {sorted(before)}")
    mixed = {name: tensor.lerp(source[name], share) for name, tensor in before.items()}
    different = [
        name for name, tensor in mixed.items() if not torch.allclose(actual[name], tensor, rtol=1e-5, atol=1e-7)
    ]
    require(not different, f"weights mix by a share of {share}; {different[:3]} do not")
