"""The suites for KL penalties, KL controllers, loss aggregations and optimizers catch planted faults."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import pytest
import torch
from broken_laws import broken_laws
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from rollcast.contracts.algorithm import Denominators
from rollcast.contracts.engine import OptimConfig
from rollcast_algorithms.kl_controllers import BaseKlController
from rollcast_algorithms.testing import KlControllerSuite
from rollcast_engine.testing import OptimizerSuite
from rollcast_testing import KlPenaltySuite, LossAggregationSuite


def k2(log_probs: Tensor, ref: Tensor) -> Tensor:
    return 0.5 * (log_probs.float() - ref.float()).square()


class Exact(KlPenaltySuite):
    """A suite of an estimator whose gradient is the divergence's."""

    unbiased_gradient = True
    examples = ((torch.tensor([[-1.0]]), torch.tensor([[-3.0]]), torch.tensor([[2.0]])),)


def test_a_right_penalty_passes() -> None:
    assert broken_laws(Exact(), {"penalty": k2}) == {}


@pytest.mark.parametrize(
    ("penalty", "law"),
    [
        (lambda log_probs, ref: k2(log_probs, ref).mean(-1), "gives_a_float_for_each_token"),
        (lambda log_probs, ref: k2(log_probs, ref).half(), "gives_a_float_for_each_token"),
        (lambda log_probs, ref: k2(log_probs, ref) + 0.1, "is_zero_where_the_policies_are_equal"),
        (lambda log_probs, ref: log_probs.float() - ref.float(), "is_never_negative"),
        (lambda log_probs, ref: (log_probs.float() - ref.float()).abs(), "its_gradient_is_the_divergences"),
        (lambda log_probs, ref: k2(log_probs, ref).detach(), "its_gradient_is_the_divergences"),
        (lambda log_probs, ref: (ref.float() - log_probs.float()).exp().log().square() / 2, "is_finite_at_extreme"),
        (lambda log_probs, ref: k2(log_probs, ref) - k2(log_probs, ref).mean(), "treats_each_token_alone"),
        (lambda log_probs, ref: k2(log_probs.add_(0.1), ref), "is_deterministic_and_leaves_its_inputs_alone"),
        (lambda log_probs, ref: 2 * k2(log_probs, ref), "agrees_with_its_examples"),
        (lambda log_probs, ref: k2(log_probs, ref) * 0.0, "grows_with_the_distance"),
    ],
)
def test_faults_of_a_penalty_are_caught(penalty: Any, law: str) -> None:
    found = broken_laws(Exact(), {"penalty": penalty})
    assert any(name.startswith(law) for name in found), found


def test_a_penalty_that_is_called_unbiased_and_is_not() -> None:
    class Suite(KlPenaltySuite):
        unbiased = True

    assert set(broken_laws(Suite(), {"penalty": k2})) == {"its_mean_is_the_divergence"}


class Rising(BaseKlController):
    """A controller whose state is the coefficient."""

    def update(self, current_kl: float, n_steps: int) -> None:
        self.value *= 1.1 if current_kl > self.settings.target_kl else 0.9


class Forgetful(Rising):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


class Negative(Rising):
    def update(self, current_kl: float, n_steps: int) -> None:
        self.value -= current_kl


class Exploding(Rising):
    def update(self, current_kl: float, n_steps: int) -> None:
        self.value *= float("inf") if current_kl > 1 else 1.0


class Own(Rising):
    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self.value = 1.0


class Drawing(Rising):
    def update(self, current_kl: float, n_steps: int) -> None:
        self.value *= float(torch.rand(()))


@pytest.mark.parametrize(
    ("controller", "laws"),
    [
        (Rising, set()),
        (Forgetful, {"a_resumed_run_continues"}),
        (Negative, {"coefficients_are_finite_and_not_negative"}),
        (Exploding, {"coefficients_are_finite_and_not_negative"}),
        (Own, {"starts_with_the_coefficient"}),
        (Drawing, {"the_same_run_has_the_same_coefficients", "a_resumed_run_continues"}),
    ],
)
def test_faults_of_a_controller_are_caught(controller: type[BaseKlController], laws: set[str]) -> None:
    class Suite(KlControllerSuite):
        def build(self) -> BaseKlController:
            return controller(self.settings())

    assert set(broken_laws(Suite(), {})) == laws


def token_mean(losses: Tensor, mask: Tensor, counts: Denominators) -> Tensor:
    total = torch.where(mask != 0, losses.float(), 0.0).sum()
    return total / counts.tokens if counts.tokens else total * 0.0


class Mean(LossAggregationSuite):
    examples = ((torch.tensor([[1.0, 3.0, 9.0]]), torch.tensor([[1, 1, 0]]), Denominators(2.0, 1.0, 3.0), 2.0),)


def test_a_right_aggregation_passes() -> None:
    assert broken_laws(Mean(), {"aggregation": token_mean}) == {}


def row_means(losses: Tensor, mask: Tensor, counts: Denominators) -> Tensor:
    """Counts a rollout of two rows twice: it does not read sequence_tokens."""
    chosen = mask != 0
    rows = torch.where(chosen, losses.float(), 0.0).sum(-1) / chosen.sum(-1).clamp(min=1)
    return rows.sum() / max(counts.sequences, 1.0)


@pytest.mark.parametrize(
    ("aggregation", "law"),
    [
        (lambda losses, mask, counts: torch.where(mask != 0, losses.float(), 0.0).mean(), "ignores_padding"),
        (lambda losses, mask, counts: (losses.float() * mask).sum() / max(counts.tokens, 1), "ignores_what_is_under"),
        (lambda losses, mask, counts: losses.float().sum() / max(counts.tokens, 1), "weights_are_positive_under"),
        (
            lambda losses, mask, counts: torch.where(mask != 0, losses.float(), 0.0).sum() / (mask != 0).sum(),
            "micro_batches_add_up",
        ),
        (lambda losses, mask, counts: 2 * token_mean(losses, mask, counts), "the_weights_add_up"),
        (lambda losses, mask, counts: token_mean(losses.float().square(), mask, counts), "is_linear"),
        (lambda losses, mask, counts: token_mean(losses, mask, counts).to(losses.dtype), "gives_one_float"),
        (lambda losses, mask, counts: token_mean(losses, mask, counts).view(1), "gives_one_float"),
        (
            lambda losses, mask, counts: torch.where(mask != 0, losses.float(), 0.0).sum() / counts.tokens,
            "a_batch_without_tokens_gives_zero",
        ),
        (
            lambda losses, mask, counts: token_mean(losses, mask, counts) if mask.any() else torch.zeros(()),
            "a_batch_without_tokens_gives_zero",
        ),
        (row_means, "a_rollout_of_several_rows_counts_once"),
        (
            lambda losses, mask, counts: (
                token_mean(losses, mask == 1, counts) if mask.dtype != torch.bool else torch.zeros(())
            ),
            "ignores_the_masks_dtype",
        ),
        (
            lambda losses, mask, counts: token_mean(
                losses.mul_(1.5) if not losses.requires_grad else losses, mask, counts
            ),
            "leaves_its_inputs_alone",
        ),
    ],
)
def test_faults_of_an_aggregation_are_caught(aggregation: Any, law: str) -> None:
    found = broken_laws(Mean(), {"aggregation": aggregation})
    assert any(name.startswith(law) for name in found), found


def adamw(parameters: Iterable[Parameter], optim: OptimConfig, lr: float) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=optim.weight_decay, **optim.optimizer_kwargs)


class OfAdamw(OptimizerSuite):
    optim: ClassVar[Mapping[str, Any]] = {"lr": 1e-2, "weight_decay": 0.1}

    def reference(self, parameters: Any, optim: OptimConfig, lr: float) -> Optimizer:
        return torch.optim.AdamW(parameters, lr=lr, weight_decay=optim.weight_decay, foreach=False)


class FixedRate(torch.optim.AdamW):
    """Steps with the rate that it was built with."""

    def __init__(self, parameters: Any, lr: float, **more: Any) -> None:
        super().__init__(parameters, lr=lr, **more)
        self.first = lr

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] = self.first
        return super().step(closure)


class Counting(torch.optim.SGD):
    """Keeps a number, which no checkpoint has, and decays its steps by it."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for each in group["params"]:
                count = self.state[each].setdefault("count", 0)
                self.state[each]["count"] = count + 1
        return super().step(closure)


class Unsaved(torch.optim.SGD):
    """Remembers how many steps it took outside of its state."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        for group in self.param_groups:
            for each in group["params"]:
                self.state[each].setdefault("kept", torch.zeros_like(each))
                if each.grad is not None:
                    each.grad = each.grad / self.steps
        return super().step(closure)


class Normed(torch.optim.SGD):
    """Divides each gradient by the norm of all."""

    def step(self, closure: Any = None) -> Any:
        grads = [each.grad for group in self.param_groups for each in group["params"] if each.grad is not None]
        norm = torch.stack([grad.square().sum() for grad in grads]).sum().sqrt() + 1e-6
        for grad in grads:
            grad.div_(norm)
        return super().step(closure)


class NormedEach(torch.optim.SGD):
    """Divides each gradient by its norm."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.grad = each.grad / (each.grad.norm() + 1e-6)
        return super().step(closure)


def swallowing(parameters: Iterable[Parameter], optim: OptimConfig, lr: float) -> Optimizer:
    known = {name: value for name, value in optim.optimizer_kwargs.items() if name == "amsgrad"}
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=optim.weight_decay, **known)


@pytest.mark.parametrize(
    ("factory", "law"),
    [
        (lambda parameters, optim, lr: adamw(list(parameters)[1:], optim, lr), "it_holds_every_parameter_once"),
        (lambda parameters, optim, lr: adamw(parameters, optim, 2 * lr), "it_holds_every_parameter_once"),
        (
            lambda parameters, optim, lr: torch.optim.Adam(parameters, lr=lr, weight_decay=optim.weight_decay),
            "its_steps_are_the_references",
        ),
        (lambda parameters, optim, lr: FixedRate(parameters, lr, weight_decay=optim.weight_decay), "the_learning_rate"),
        (lambda parameters, optim, lr: torch.optim.SGD(parameters, lr=lr, maximize=True), "it_descends"),
        (lambda parameters, optim, lr: Counting(parameters, lr=lr), "its_state_is_tensors"),
        (lambda parameters, optim, lr: Unsaved(parameters, lr=lr), "a_resumed_run_continues"),
        (lambda parameters, optim, lr: Normed(parameters, lr=lr), "a_parameter_does_not_depend_on_others"),
        (lambda parameters, optim, lr: NormedEach(parameters, lr=lr), "a_shard_steps_as_the_whole"),
        (swallowing, "an_unknown_option_is_refused"),
    ],
)
def test_faults_of_an_optimizer_are_caught(factory: Any, law: str) -> None:
    found = broken_laws(OfAdamw(), {"factory": factory})
    assert any(name.startswith(law) for name in found), found


def test_a_right_optimizer_passes() -> None:
    assert broken_laws(OfAdamw(), {"factory": adamw}) == {}
