"""The conformance suite of optimizers, a class of pytest tests to inherit; it needs rollcast-engine.

Example, in a plugin's tests::

    from rollcast_engine.testing import OptimizerSuite

    class TestRmsprop(OptimizerSuite):
        name = "rmsprop"

        def reference(self, parameters, optim, lr):
            return torch.optim.RMSprop(parameters, lr=lr, weight_decay=optim.weight_decay)
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from rollcast.contracts.engine import OptimConfig
from rollcast_engine.optim import OptimizerFactory, optimizers, prime_optimizer, set_lr
from rollcast_testing.checks import require

__all__ = ["OptimizerSuite"]

_SHAPES = ((4, 6), (7,), (3, 2, 2), ())


class OptimizerSuite:
    """Conformance tests of one optimizer.

    Set :attr:`name`, and override :meth:`reference` to compare with an optimizer that you trust.
    """

    #: Name of the optimizer in ``rollcast.optimizers``.
    name: ClassVar[str] = ""
    #: Keys of ``actor.optim`` for the tests; the suite sets ``optimizer``.
    optim: ClassVar[Mapping[str, Any]] = {"lr": 1e-2, "weight_decay": 0.1}
    #: True if a parameter's step depends on its elements one by one, so that a shard of the parameter steps as the
    #: whole does. FSDP shards parameters.
    elementwise: ClassVar[bool] = True
    rtol: ClassVar[float] = 1e-5
    atol: ClassVar[float] = 1e-6

    @pytest.fixture
    def factory(self) -> OptimizerFactory:
        """Return the factory under test; by default the plugin :attr:`name`."""
        if not self.name:
            raise NotImplementedError(f"{type(self).__name__} must set `name` or override the fixture `factory`")
        return optimizers.get(self.name, requested_by=f"{type(self).__name__}.name")

    def reference(self, parameters: Sequence[Parameter], optim: OptimConfig, lr: float) -> Optimizer | None:
        """Return an optimizer whose steps are the same; None if there is none."""
        return None

    def config(self, **changes: Any) -> OptimConfig:
        """Return the section ``actor.optim`` of the tests."""
        return OptimConfig(**{"optimizer": self.name, **copy.deepcopy(dict(self.optim)), **changes})

    def parameters(self, seed: int = 0) -> list[Parameter]:
        """Return parameters of several shapes, a scalar among them."""
        generator = torch.Generator().manual_seed(seed)
        return [Parameter(torch.randn(shape, generator=generator)) for shape in _SHAPES]

    def build(
        self, factory: OptimizerFactory, parameters: Iterable[Parameter], **changes: Any
    ) -> tuple[Optimizer, OptimConfig]:
        """Build the optimizer with the suite's settings; the learning rate is the peak."""
        optim = self.config(**changes)
        return factory(parameters, optim, optim.lr), optim

    def test_it_holds_every_parameter_once(self, factory: OptimizerFactory) -> None:
        parameters = self.parameters()
        # Engines pass module.parameters(), which can be read once.
        optimizer, optim = self.build(factory, iter(parameters))
        require(isinstance(optimizer, Optimizer), f"returns a torch Optimizer, not a {type(optimizer).__name__}")
        held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
        require(sorted(held) == sorted(map(id, parameters)), "the groups hold every given parameter exactly once")
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        is_given = all(math.isclose(rate, optim.lr, rel_tol=1e-6) for rate in rates)
        require(is_given, f"the rates of the groups {rates} are the given {optim.lr}")

    def test_building_it_changes_no_parameter(self, factory: OptimizerFactory) -> None:
        parameters = self.parameters()
        before = _copies(parameters)
        optimizer, _ = self.build(factory, parameters)
        prime_optimizer(optimizer)
        require(_equal(parameters, before), "building and priming leave the parameters as they are")

    def test_its_steps_are_the_references(self, factory: OptimizerFactory) -> None:
        mine, theirs = self.parameters(), self.parameters()
        optimizer, optim = self.build(factory, mine)
        reference = self.reference(theirs, optim, optim.lr)
        if reference is None:
            pytest.skip("the suite has no reference")
        for step in range(5):
            for one, group in ((optimizer, mine), (reference, theirs)):
                _step(one, group, step)
            for value, expected in zip(mine, theirs, strict=True):
                torch.testing.assert_close(
                    value,
                    expected,
                    rtol=self.rtol,
                    atol=self.atol,
                    msg=lambda text, step=step: f"failed check: step {step} is the reference's\n{text}",  # type: ignore[misc]
                )

    def test_it_descends(self, factory: OptimizerFactory) -> None:
        parameters = self.parameters()
        optimizer, _ = self.build(factory, parameters, weight_decay=0.0)
        goals = [torch.full_like(parameter, 0.5) for parameter in parameters]

        def distance() -> Tensor:
            return torch.stack(
                [(parameter - goal).square().sum() for parameter, goal in zip(parameters, goals, strict=True)]
            ).sum()

        first = float(distance().detach())
        for _ in range(100):
            optimizer.zero_grad()
            total: Any = distance()  # torch's stubs lack the type of backward
            total.backward()
            optimizer.step()
        last = float(distance().detach())
        require(last < first, f"100 steps on a square decrease it; it was {first:.4g} and is {last:.4g}")

    def test_the_learning_rate_of_the_groups_counts(self, factory: OptimizerFactory) -> None:
        """Check that an engine's schedule, which sets ``lr`` in the groups, has its effect."""
        moved = []
        for factor in (0.0, 1.0, 0.5):
            parameters = self.parameters()
            optimizer, optim = self.build(factory, parameters)
            set_lr(optimizer, factor * optim.lr)
            before = _copies(parameters)
            _step(optimizer, parameters, 0)
            moved.append(
                sum(
                    float((parameter.detach() - old).abs().sum())
                    for parameter, old in zip(parameters, before, strict=True)
                )
            )
        require(moved[0] == 0.0, "with the rate 0 a step moves nothing")
        require(0.0 < moved[2] < moved[1], f"half the rate moves less: {moved[2]:.4g} and {moved[1]:.4g}")

    def test_a_parameter_without_a_gradient_stays(self, factory: OptimizerFactory) -> None:
        parameters = self.parameters()
        optimizer, _ = self.build(factory, parameters)
        before = _copies(parameters)
        _step(optimizer, parameters[1:], 0)
        require(torch.equal(parameters[0], before[0]), "a parameter without a gradient stays as it is")
        require(not torch.equal(parameters[1], before[1]), "the others move")

    def test_a_parameter_does_not_depend_on_others(self, factory: OptimizerFactory) -> None:
        whole, alone = self.parameters(), self.parameters()[:1]
        optimizers_of = [self.build(factory, parameters)[0] for parameters in (whole, alone)]
        for step in range(3):
            for optimizer, parameters in zip(optimizers_of, (whole, alone), strict=True):
                _step(optimizer, parameters, step)
        require(
            torch.equal(whole[0], alone[0]), "a parameter steps as it does alone, because ranks hold different ones"
        )

    def test_a_shard_steps_as_the_whole(self, factory: OptimizerFactory) -> None:
        if not self.elementwise:
            pytest.skip("elementwise is False")
        whole = self.parameters()[0]
        shards = [Parameter(rows.clone()) for rows in whole.detach().chunk(2)]
        first, _ = self.build(factory, [whole])
        second, _ = self.build(factory, shards)
        for step in range(3):
            gradient = torch.sin(torch.arange(whole.numel()) + step).view(whole.shape)
            whole.grad = gradient
            for shard, part in zip(shards, gradient.chunk(2), strict=True):
                shard.grad = part.clone()
            first.step()
            second.step()
        law = "with elementwise, the shards of a parameter step as the whole does"
        torch.testing.assert_close(
            torch.cat([shard.detach() for shard in shards]),
            whole.detach(),
            rtol=self.rtol,
            atol=self.atol,
            msg=lambda text: f"failed check: {law}\n{text}",
        )

    def test_its_state_is_tensors(self, factory: OptimizerFactory) -> None:
        parameters = self.parameters()
        optimizer, _ = self.build(factory, parameters)
        _step(optimizer, parameters, 0)
        wrong = [
            f"{name} is a {type(value).__name__}"
            for state in optimizer.state.values()
            for name, value in state.items()
            if not isinstance(value, Tensor)
        ]
        require(not wrong, f"state per parameter is tensors, because checkpoints keep nothing else: {', '.join(wrong)}")

    def test_a_resumed_run_continues(self, factory: OptimizerFactory) -> None:
        """Check that parameters and state, restored into a new and primed optimizer, take the same steps."""
        parameters = self.parameters()
        optimizer, _ = self.build(factory, parameters)
        for step in range(3):
            _step(optimizer, parameters, step)
        resumed = [Parameter(parameter.detach().clone()) for parameter in parameters]
        other, _ = self.build(factory, resumed)
        prime_optimizer(other)
        layouts = [
            [{name: value.shape for name, value in current.state[p].items()} for p in group]
            for current, group in ((optimizer, parameters), (other, resumed))
        ]
        require(
            layouts[0] == layouts[1],
            f"a primed optimizer has the state's entries and shapes: {layouts[1]} are {layouts[0]}",
        )
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for step in range(3, 6):
            _step(optimizer, parameters, step)
            _step(other, resumed, step)
            require(_equal(resumed, _copies(parameters)), f"step {step} of a resumed run is the same to the last bit")

    def test_a_gradient_of_zeros_is_finite(self, factory: OptimizerFactory) -> None:
        parameters = self.parameters()
        optimizer, _ = self.build(factory, parameters)
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        finite = all(math.isfinite(float(weight.detach().sum())) for weight in parameters)
        require(finite, "parameters are finite after a step with a gradient of zeros")

    def test_an_unknown_option_is_refused(self, factory: OptimizerFactory) -> None:
        with pytest.raises((TypeError, ValueError)):
            self.build(factory, self.parameters(), optimizer_kwargs={"an_option_that_nobody_has": 1})


def _step(optimizer: Optimizer, parameters: Sequence[Parameter], step: int) -> None:
    """Take a step with gradients that depend on the number of the step."""
    optimizer.zero_grad(set_to_none=True)
    for parameter in parameters:
        parameter.grad = torch.cos(torch.arange(parameter.numel()) * 0.7 + parameter.numel() + step).view(
            parameter.shape
        )
    optimizer.step()


def _copies(parameters: Iterable[Parameter]) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in parameters]


def _equal(parameters: Sequence[Parameter], copies: Sequence[Tensor]) -> bool:
    return all(torch.equal(parameter.detach(), other) for parameter, other in zip(parameters, copies, strict=True))
