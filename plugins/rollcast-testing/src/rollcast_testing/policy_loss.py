"""The conformance suite of policy losses, a class of pytest tests to inherit."""

from __future__ import annotations

import copy
import functools
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from rollcast.contracts.algorithm import (
    PolicyLoss,
    PolicyLossInputs,
    PolicyLossOutput,
    needs_of,
    policy_losses,
    prepare_policy_loss,
)
from rollcast_testing.checks import require

__all__ = ["PolicyLossSuite"]

_TENSORS = ("log_probs", "old_log_probs", "advantages", "response_mask")


class PolicyLossSuite:
    """Conformance tests of one policy loss.

    Set :attr:`name`, or override the fixture :meth:`policy_loss` with the function itself::

        class TestMyLoss(PolicyLossSuite):
            name = "my_loss"

    Gradients are those of the masked sum of the losses with respect to the log-probs. The loss's ``prepare`` function,
    if any, runs before each call.
    """

    #: Name of the loss in ``rollcast.policy_losses``.
    name: ClassVar[str] = ""
    #: Keys of ``actor.policy_loss_kwargs`` for the tests.
    options: ClassVar[Mapping[str, Any]] = {}
    #: True if the gradient of an on-policy token is minus its advantage, as for every loss that is the policy gradient
    #: at ratio 1.
    on_policy_gradient: ClassVar[bool] = True
    #: Hand-computed examples: inputs and expected losses, ``[B, T]``.
    examples: ClassVar[Sequence[tuple[PolicyLossInputs, Sequence[Sequence[float]]]]] = ()
    #: For a column of your own that the loss declares: a function from a generator to a tensor for five rows,
    #: ``[5]`` or ``[5, 7]``. Without one, the column is drawn from a normal distribution, ``[5, 7]``.
    columns: ClassVar[Mapping[str, Callable[[torch.Generator], Tensor]]] = {}
    rtol: ClassVar[float] = 1e-4
    atol: ClassVar[float] = 1e-5

    @pytest.fixture
    def policy_loss(self) -> PolicyLoss:
        """Return the loss under test; by default the plugin :attr:`name`."""
        if not self.name:
            raise NotImplementedError(f"{type(self).__name__} must set `name` or override the fixture `policy_loss`")
        return policy_losses.get(self.name, requested_by=f"{type(self).__name__}.name")

    def inputs(self, policy_loss: PolicyLoss | None = None, seed: int = 0) -> PolicyLossInputs:
        """Build inputs of five rows with ragged masks, and log-ratios on both sides of a usual clip range."""
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.tensor([7, 3, 5, 1, 6])
        mask = (torch.arange(7) < lengths.unsqueeze(-1)).long()
        mask[2, 1:3] = 0  # a tool's answer inside a response
        old = -3 * torch.rand(5, 7, generator=generator) - 0.5
        return PolicyLossInputs(
            log_probs=(old + 0.3 * torch.randn(5, 7, generator=generator)).requires_grad_(),
            old_log_probs=old,
            advantages=torch.randn(5, 7, generator=generator),
            response_mask=mask,
            options=copy.deepcopy(dict(self.options)),
            columns=self._columns(policy_loss, generator),
        )

    def _columns(self, policy_loss: PolicyLoss | None, generator: torch.Generator) -> dict[str, Tensor]:
        names = [] if policy_loss is None else sorted(needs_of(policy_loss).columns)
        drawn = {}
        for name in [f"{name}part" if name.endswith("/") else name for name in names]:
            draw = self.columns.get(name)
            drawn[name] = torch.randn(5, 7, generator=generator) if draw is None else draw(generator)
        return drawn

    def test_agrees_with_its_examples(self, policy_loss: PolicyLoss) -> None:
        if not self.examples:
            pytest.skip("the suite has no examples")
        for number, (inputs, losses) in enumerate(self.examples):
            actual = {"losses": _evaluate(policy_loss, inputs)["losses"]}
            law = f"example {number} gives what was worked out by hand"
            self._require_close(actual, {"losses": torch.tensor(losses)}, law)

    def test_gives_a_float32_loss_per_token(self, policy_loss: PolicyLoss) -> None:
        inputs = _prepared(policy_loss, self.inputs(policy_loss))
        out = policy_loss(inputs)
        shape = inputs.response_mask.shape
        require(isinstance(out, PolicyLossOutput), f"gives PolicyLossOutput, not {type(out).__name__}")
        require(out.losses.shape == shape, f"losses have the mask's shape, not {out.losses.shape}")
        require(out.losses.dtype == torch.float32, f"losses are float32, not {out.losses.dtype}")
        require(out.losses.requires_grad, "losses depend on the log-probs")

    def test_gives_metrics_per_token_without_gradient(self, policy_loss: PolicyLoss) -> None:
        inputs = _prepared(policy_loss, self.inputs(policy_loss))
        for name, metric in policy_loss(inputs).metrics.items():
            shape = inputs.response_mask.shape
            require(metric.shape == shape, f"metric {name} has the mask's shape, not {metric.shape}")
            require(not metric.requires_grad, f"metric {name} carries no gradient")
            require(metric.is_floating_point(), f"metric {name} can be averaged, but is {metric.dtype}")
            require(bool(metric[inputs.response_mask != 0].isfinite().all()), f"metric {name} is finite")

    def test_ignores_what_is_under_the_mask(self, policy_loss: PolicyLoss) -> None:
        inputs = self.inputs(policy_loss)
        expected, hidden = _evaluate(policy_loss, inputs), inputs.response_mask == 0
        for garbage in (1e30, float("inf"), float("-inf"), float("nan")):
            # One column at a time as well: inf - inf hides what inf alone would show.
            for dirty_names in (_TENSORS[:3], *((name,) for name in _TENSORS[:3])):
                filled: dict[str, Any] = {
                    name: getattr(inputs, name).detach().masked_fill(hidden, garbage) for name in dirty_names
                }
                actual = _evaluate(policy_loss, replace(inputs, **filled))
                law = f"{garbage} in {', '.join(dirty_names)} under the mask changes nothing"
                self._require_close(actual, expected, law)
            for name, column in inputs.columns.items():
                if column.shape == hidden.shape and column.is_floating_point():
                    dirty = inputs.with_columns({name: column.masked_fill(hidden, garbage)})
                    law = f"{garbage} in the column {name} under the mask changes nothing"
                    self._require_close(_evaluate(policy_loss, dirty), expected, law)

    def test_says_honestly_which_columns_it_needs(self, policy_loss: PolicyLoss) -> None:
        inputs = self.inputs(policy_loss)
        for name in sorted(needs_of(policy_loss).columns):
            remaining = {key: column for key, column in inputs.columns.items() if not _is_named(key, name)}
            with pytest.raises(ValueError, match=re.escape(name)):
                _evaluate(policy_loss, replace(inputs, columns=remaining))

    def test_sends_no_gradient_under_the_mask(self, policy_loss: PolicyLoss) -> None:
        inputs = self.inputs(policy_loss)
        gradient = _evaluate(policy_loss, inputs)["gradient"]
        require(bool((gradient[inputs.response_mask == 0] == 0).all()), "no gradient where the mask is zero")

    def test_ignores_right_padding(self, policy_loss: PolicyLoss) -> None:
        inputs = self.inputs(policy_loss)
        padded = _evaluate(policy_loss, _map(inputs, _pad_right))
        cut = {name: tensor[:, : inputs.response_mask.shape[1]] for name, tensor in padded.items()}
        self._require_close(cut, _evaluate(policy_loss, inputs), "further padding on the right changes nothing")

    def test_ignores_the_masks_dtype(self, policy_loss: PolicyLoss) -> None:
        inputs = self.inputs(policy_loss)
        expected = _evaluate(policy_loss, inputs)
        for dtype in (torch.bool, torch.float32):
            actual = _evaluate(policy_loss, replace(inputs, response_mask=inputs.response_mask.to(dtype)))
            self._require_close(actual, expected, f"a {dtype} mask means the same as an int64 one")

    def test_follows_a_permutation_of_rows(self, policy_loss: PolicyLoss) -> None:
        inputs, order = self.inputs(policy_loss), torch.tensor([3, 0, 4, 1, 2])
        actual = _evaluate(policy_loss, _map(inputs, lambda tensor: tensor[order]))
        moved = {name: tensor[order] for name, tensor in _evaluate(policy_loss, inputs).items()}
        self._require_close(actual, moved, "permuted rows give permuted results")

    def test_does_not_mix_rows(self, policy_loss: PolicyLoss) -> None:
        # What makes an update the same however a batch is cut into ranks and micro-batches.
        inputs = _prepared(policy_loss, self.inputs(policy_loss))
        alone = [_map(inputs, operator.itemgetter(slice(row, row + 1))) for row in range(len(inputs.response_mask))]
        parts = [_evaluate(policy_loss, row) for row in alone]
        joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        self._require_close(joined, _evaluate(policy_loss, inputs), "rows alone give what they give in a batch")

    def test_has_the_policy_gradient_on_policy(self, policy_loss: PolicyLoss) -> None:
        if not self.on_policy_gradient:
            pytest.skip("on_policy_gradient is False")
        inputs = self.inputs(policy_loss)
        gradient = _evaluate(policy_loss, replace(inputs, log_probs=inputs.old_log_probs))["gradient"]
        expected = {"gradient": torch.where(inputs.response_mask != 0, -inputs.advantages, 0.0)}
        self._require_close({"gradient": gradient}, expected, "at ratio 1 the gradient is minus the advantage")

    def test_is_finite_at_extreme_ratios(self, policy_loss: PolicyLoss) -> None:
        inputs = self.inputs(policy_loss)
        for log_ratio in (30.0, 100.0, 1e4, -30.0, -100.0, -1e4):
            for sign in (1.0, -1.0):
                extreme = replace(
                    inputs,
                    log_probs=inputs.old_log_probs + log_ratio,
                    advantages=sign * (inputs.advantages.abs() + 0.1),
                )
                for name, tensor in _evaluate(policy_loss, extreme).items():
                    law = f"{name} are finite at the log-ratio {log_ratio}, advantage of sign {sign:+.0f}"
                    require(bool(tensor.isfinite().all()), law)

    def test_takes_half_precision(self, policy_loss: PolicyLoss) -> None:
        inputs = self.inputs(policy_loss)
        for dtype in (torch.bfloat16, torch.float16):
            half = _map(inputs, functools.partial(_cast, dtype=dtype))
            wide = _map(half, functools.partial(_cast, dtype=torch.float32))
            actual, expected = _evaluate(policy_loss, half), _evaluate(policy_loss, wide)
            for name in ("losses", "gradient"):
                close = torch.allclose(actual[name].float(), expected[name], rtol=0.02, atol=0.02)
                require(close, f"{name} for {dtype} are those of the same numbers in float32")

    def test_takes_rows_without_tokens(self, policy_loss: PolicyLoss) -> None:
        inputs = self.inputs(policy_loss)
        mask = inputs.response_mask.clone()
        mask[1] = 0
        for where, empty in (("one row", mask), ("any row", torch.zeros_like(mask))):
            for name, tensor in _evaluate(policy_loss, replace(inputs, response_mask=empty)).items():
                require(bool(tensor.isfinite().all()), f"{name} are finite with no token in {where}")
                require(bool((tensor[empty == 0] == 0).all()), f"{name} are zero there, with no token in {where}")

    def test_is_deterministic(self, policy_loss: PolicyLoss) -> None:
        inputs = self.inputs(policy_loss)
        first, second = _evaluate(policy_loss, inputs), _evaluate(policy_loss, inputs)
        require(all(torch.equal(first[name], second[name]) for name in first), "the same inputs give the same bits")

    def test_leaves_its_inputs_alone(self, policy_loss: PolicyLoss) -> None:
        inputs = self.inputs(policy_loss)
        before = copy.deepcopy(inputs)
        policy_loss(_prepared(policy_loss, inputs))
        for item in fields(PolicyLossInputs):
            old, new = getattr(before, item.name), getattr(inputs, item.name)
            require(_same(old, new), f"inputs.{item.name} is not modified")

    def _require_close(self, actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], law: str) -> None:
        __tracebackhide__ = True
        require(actual.keys() == expected.keys(), f"{law}; the metrics are {sorted(actual)}, not {sorted(expected)}")
        for name in expected:
            torch.testing.assert_close(
                actual[name],
                expected[name],
                rtol=self.rtol,
                atol=self.atol,
                msg=lambda text, name=name: f"failed check: {law}; {name} differ.\n{text}",  # type: ignore[misc]
            )


def _pad_right(tensor: Tensor) -> Tensor:
    return torch.nn.functional.pad(tensor, (0, 5)) if tensor.ndim > 1 else tensor


def _is_named(column: str, name: str) -> bool:
    return column.startswith(name) if name.endswith("/") else column == name


def _map(inputs: PolicyLossInputs, change: Callable[[Tensor], Tensor]) -> PolicyLossInputs:
    """Apply ``change`` to every tensor."""
    changed: dict[str, Any] = {name: change(getattr(inputs, name).detach()) for name in _TENSORS}
    prepared = {name: change(column) for name, column in inputs.prepared.items()}
    columns = {name: change(column) for name, column in inputs.columns.items()}
    return replace(inputs, prepared=prepared, columns=columns, **changed)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _same(old: Any, new: Any) -> bool:
    if isinstance(old, Tensor):
        return torch.equal(old, new)
    if isinstance(old, Mapping):
        return old.keys() == new.keys() and all(_same(old[key], new[key]) for key in old)
    return bool(old == new)


def _prepared(policy_loss: PolicyLoss, inputs: PolicyLossInputs) -> PolicyLossInputs:
    """Return the inputs with the columns that the loss prepares from these rows, unless they are set already."""
    if inputs.prepared:
        return inputs
    # As in the trainer, all tokens of the batch are in one row.
    shape = inputs.response_mask.shape
    flat = _map(replace(inputs, log_probs=inputs.old_log_probs), lambda tensor: tensor.reshape(1, -1))
    prepared = prepare_policy_loss(policy_loss, flat)
    return replace(inputs, prepared={name: column.reshape(shape) for name, column in prepared.items()})


def _evaluate(policy_loss: PolicyLoss, inputs: PolicyLossInputs) -> dict[str, Tensor]:
    """Return masked losses and metrics, and the unmasked gradient, all ``[B, T]``."""
    leaf = inputs.log_probs.detach().clone().requires_grad_()
    out = policy_loss(replace(_prepared(policy_loss, inputs), log_probs=leaf))
    chosen = inputs.response_mask != 0
    losses = torch.where(chosen, out.losses, 0.0)
    (gradient,) = torch.autograd.grad(losses.sum(), leaf)
    metrics = {f"metric {name}": torch.where(chosen, metric, 0.0) for name, metric in out.metrics.items()}
    return {"losses": losses.detach(), "gradient": gradient, **metrics}
