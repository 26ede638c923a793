"""Optimizers by name, and learning-rate schedules."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from rollcast import build_section
from rollcast.contracts.engine import OptimConfig
from rollcast.errors import ConfigError, PluginNotFoundError
from rollcast_engine.optim import build_optimizer, check_optim, optimizers, prime_optimizer, set_lr
from rollcast_engine.schedule import learning_rate, warmup_steps

DECAYING = ("linear", "cosine", "wsd")


@st.composite
def schedules(draw: st.DrawFn) -> OptimConfig:
    total = draw(st.integers(2, 200))
    warmup = draw(st.integers(0, total - 1))
    return OptimConfig(
        lr=draw(st.sampled_from([1.0, 3e-4])),
        lr_warmup_steps=warmup,
        lr_scheduler_type=draw(st.sampled_from(("constant", *DECAYING))),
        lr_wsd_decay_steps=draw(st.integers(1, total - warmup)),
        lr_wsd_decay_style=draw(st.sampled_from(("linear", "cosine", "minus_sqrt"))),
        min_lr_ratio=draw(st.sampled_from([0.0, 0.1, 1.0])),
        total_training_steps=total,
    )


@given(schedules())
def test_a_schedule_rises_to_its_peak_and_then_falls_to_its_floor(optim: OptimConfig) -> None:
    check_optim(optim)
    total, warmup = optim.total_training_steps, optim.lr_warmup_steps
    rates = [learning_rate(optim, step) for step in range(total + 3)]
    rising, rest = rates[: warmup + 1], rates[warmup:]
    assert rising[:-1] == pytest.approx([optim.lr * (step + 1) / warmup for step in range(warmup)])
    assert rest[0] == optim.lr
    assert all(later <= earlier for earlier, later in pairwise(rest))
    floor = optim.lr if optim.lr_scheduler_type == "constant" else optim.lr * optim.min_lr_ratio
    assert rates[total:] == pytest.approx([floor] * 3)


@given(schedules())
def test_a_schedule_is_continuous(optim: OptimConfig) -> None:
    """No step changes the rate by more than the steepest place of its decay, or a step of the warm-up."""
    total, warmup = optim.total_training_steps, optim.lr_warmup_steps
    rates = [learning_rate(optim, step) for step in range(total + 2)]
    is_wsd = optim.lr_scheduler_type == "wsd"
    decay = (optim.lr_wsd_decay_steps or 1) if is_wsd else max(1, total - warmup)
    steepest = {"linear": 1 / decay, "cosine": math.pi / 2 / decay, "minus_sqrt": 1 / math.sqrt(decay)}
    slope = steepest[optim.lr_wsd_decay_style if is_wsd else "cosine"]
    for step, (earlier, later) in enumerate(pairwise(rates)):
        limit = 1 / warmup if step < warmup else slope
        assert abs(later - earlier) <= optim.lr * limit + 1e-12


@given(st.integers(3, 300), st.data())
def test_wsd_stays_at_its_peak_until_the_decay(total: int, data: st.DataObject) -> None:
    warmup = data.draw(st.integers(0, total - 2))
    decay = data.draw(st.integers(1, total - warmup))
    optim = OptimConfig(
        lr=1.0,
        lr_warmup_steps=warmup,
        lr_scheduler_type="wsd",
        lr_wsd_decay_steps=decay,
        min_lr_ratio=0.2,
        total_training_steps=total,
    )
    rates = [learning_rate(optim, step) for step in range(total + 1)]
    assert all(rate == 1.0 for rate in rates[warmup : total - decay + 1])
    assert rates[total - decay :] == pytest.approx([1.0 - 0.8 * step / decay for step in range(decay + 1)])


def test_wsd_decays_over_a_tenth_unless_told() -> None:
    optim = OptimConfig(lr=1.0, lr_scheduler_type="wsd", total_training_steps=50)
    rates = [learning_rate(optim, step) for step in (0, 45, 46, 50, 60)]
    assert rates == pytest.approx([1.0, 1.0, 0.8, 0.0, 0.0])


@given(st.integers(1, 500), st.floats(0.0, 1.0))
def test_the_warm_up_as_a_ratio(total: int, ratio: float) -> None:
    by_ratio = OptimConfig(lr_warmup_steps_ratio=ratio, lr_scheduler_type="cosine", total_training_steps=total)
    by_steps = replace(by_ratio, lr_warmup_steps=int(ratio * total), lr_warmup_steps_ratio=0.0)
    assert warmup_steps(by_ratio) == warmup_steps(by_steps)
    assert [learning_rate(by_ratio, step) for step in range(total)] == [
        learning_rate(by_steps, step) for step in range(total)
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr_scheduler_type": "step"}, "lr_scheduler_type must be one of constant, linear, cosine, wsd, got 'step'"),
        ({"lr_scheduler_type": "cosine", "total_training_steps": -1}, "cosine needs critic.optim.total_training_steps"),
        (
            {"lr_warmup_steps_ratio": 0.1, "total_training_steps": -1},
            "lr_warmup_steps_ratio=0.1 needs critic.optim.total",
        ),
        ({"lr_warmup_steps_ratio": 1.5}, r"critic\.optim\.lr_warmup_steps_ratio must be from 0 to 1, got 1.5"),
        ({"min_lr_ratio": -0.1}, "min_lr_ratio must be from 0 to 1, got -0.1"),
        (
            {"lr_scheduler_type": "wsd", "lr_wsd_decay_style": "sudden"},
            "one of linear, cosine, minus_sqrt, got 'sudden'",
        ),
        ({"lr_scheduler_type": "wsd", "lr_wsd_decay_steps": 0}, "lr_wsd_decay_steps must be at least 1 or null, got 0"),
        ({"lr_scheduler_type": "wsd", "lr_warmup_steps": 8, "lr_wsd_decay_steps": 3}, "do not fit into .*steps=10"),
        ({"clip_grad": 0.0}, "clip_grad must be above 0, got 0.0"),
        ({"betas": [0.9]}, "betas must be a list of 2 numbers"),
    ],
)
def test_wrong_values_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_optim(build_section(OptimConfig, {"total_training_steps": 10, **changes}, "critic.optim"), "critic.optim")


@pytest.mark.parametrize(("device", "fused"), [("cuda", True), ("cpu", True), ("meta", False)])
def test_adamw_is_fused_where_the_device_has_it(device: str, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for torch's AdamW takes the options, because there need be no such device here."""
    taken: dict[str, Any] = {}

    class Parameter:
        requires_grad = True

        def __init__(self) -> None:
            self.device = torch.device(device)

    monkeypatch.setattr(torch.optim, "AdamW", lambda parameters, **options: taken.update(options))
    # With amsgrad torch makes the state itself, so nothing is allocated on the device.
    build_optimizer([Parameter()], OptimConfig(optimizer_kwargs={"amsgrad": True}))  # type: ignore[list-item]
    assert taken["fused"] is fused
    build_optimizer([Parameter()], OptimConfig(optimizer_kwargs={"amsgrad": True, "fused": False}))  # type: ignore[list-item]
    assert taken["fused"] is False


def test_an_unknown_optimizer_is_refused_with_those_that_exist() -> None:
    with pytest.raises(PluginNotFoundError, match=r"adamm.*(?s:.)*adamw.*(?s:.)*sgd"):
        check_optim(OptimConfig(optimizer="adamm"))


def _problem() -> tuple[nn.Linear, Tensor]:
    torch.manual_seed(3)
    return nn.Linear(4, 3), torch.randn(5, 4)


def _steps(module: nn.Linear, inputs: Tensor, optimizer: torch.optim.Optimizer, count: int = 4) -> list[Tensor]:
    for _ in range(count):
        optimizer.zero_grad()
        module(inputs).square().sum().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in module.parameters()]


@pytest.mark.parametrize(
    ("optim", "reference"),
    [
        (
            OptimConfig(lr=0.1, betas=[0.8, 0.9], eps=1e-3, weight_decay=0.1),
            lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.1),
        ),
        (
            OptimConfig(lr=0.1, optimizer_kwargs={"amsgrad": True}, weight_decay=0.0),
            lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True, weight_decay=0.0),
        ),
        (
            OptimConfig(optimizer="sgd", lr=0.01, weight_decay=0.1, optimizer_kwargs={"momentum": 0.9}),
            lambda p: torch.optim.SGD(p, lr=0.01, weight_decay=0.1, momentum=0.9),
        ),
        (OptimConfig(optimizer="sgd", lr=0.01, weight_decay=0.0), lambda p: torch.optim.SGD(p, lr=0.01)),
    ],
    ids=["adamw", "amsgrad", "momentum", "sgd"],
)
def test_optimizers_step_as_torch_does(optim: OptimConfig, reference: Any) -> None:
    module, inputs = _problem()
    plain, _ = _problem()
    ours = _steps(module, inputs, build_optimizer(module.parameters(), optim))
    for given_, expected in zip(ours, _steps(plain, inputs, reference(plain.parameters())), strict=True):
        torch.testing.assert_close(given_, expected)


def test_only_what_requires_a_gradient_is_trained() -> None:
    module, _ = _problem()
    module.weight.requires_grad_(False)
    groups = build_optimizer(module.parameters(), OptimConfig()).param_groups
    assert [id(parameter) for group in groups for parameter in group["params"]] == [id(module.bias)]
    module.bias.requires_grad_(False)
    with pytest.raises(ConfigError, match="nothing to train"):
        build_optimizer(module.parameters(), OptimConfig())


def test_options_that_an_optimizer_does_not_know_are_named() -> None:
    module, _ = _problem()
    with pytest.raises(ConfigError, match=r"sgd cannot be built with optim\.optimizer_kwargs=.*momentun"):
        build_optimizer(module.parameters(), OptimConfig(optimizer="sgd", optimizer_kwargs={"momentun": 0.9}))


def test_priming_makes_state_and_changes_no_parameter() -> None:
    optimizers.register("rmsprop", lambda parameters, optim, lr: torch.optim.RMSprop(parameters, lr=lr, momentum=0.5))
    try:
        module, inputs = _problem()
        before = [parameter.detach().clone() for parameter in module.parameters()]
        optimizer = build_optimizer(module.parameters(), OptimConfig(optimizer="rmsprop", lr=0.1))
    finally:
        optimizers.unregister("rmsprop")
    assert not optimizer.state
    prime_optimizer(optimizer)
    assert {"square_avg", "momentum_buffer"} <= set(optimizer.state[module.weight])
    assert all(torch.equal(now, then) for now, then in zip(module.parameters(), before, strict=True))
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert module.weight.grad is None
    other = torch.optim.SGD(module.parameters(), momentum=0.9)
    module(inputs).sum().backward()
    with pytest.raises(RuntimeError, match="between a backward pass and its step"):
        prime_optimizer(other)


def test_eight_bit_adam_needs_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(ConfigError, match=r"adamw_8bit needs torchao.*pip install 'rollcast-engine\[torchao\]'"):
        build_optimizer([nn.Parameter(torch.zeros(3))], OptimConfig(optimizer="adamw_8bit"))


def test_a_learning_rate_in_a_tensor_stays_in_it() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=torch.tensor(0.5))
    rate = optimizer.param_groups[0]["lr"]
    set_lr(optimizer, 0.25)
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == 0.25
