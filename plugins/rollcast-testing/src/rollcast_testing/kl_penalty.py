"""The conformance suite of KL penalties, a class of pytest tests to inherit."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from rollcast.contracts.algorithm import KlPenalty, kl_penalties, needs_vocabulary
from rollcast_testing.checks import require

__all__ = ["KlPenaltySuite"]


class KlPenaltySuite:
    """Conformance tests of one KL penalty.

    Set :attr:`name`, or override the fixture :meth:`penalty` with the function itself::

        class TestMyPenalty(KlPenaltySuite):
            name = "my_penalty"
            never_negative = False

    Expectations are exact sums over a vocabulary of five tokens, not samples.
    """

    #: Name of the penalty in ``rollcast.kl_penalties``.
    name: ClassVar[str] = ""
    #: True if no value is below zero.
    never_negative: ClassVar[bool] = True
    #: True if the expected value over the policy's tokens is the divergence, for policies that are close.
    unbiased: ClassVar[bool] = False
    #: True if the expected gradient over the policy's tokens is the divergence's, for close policies. If False,
    #: use the penalty in the reward, where only its value matters.
    unbiased_gradient: ClassVar[bool] = False
    #: Hand-computed examples: log-probs, reference log-probs and expected values, ``[B, T]``, or ``[B, T, V]`` for the
    #: inputs of a penalty over the vocabulary.
    examples: ClassVar[Sequence[tuple[Tensor, Tensor, Tensor]]] = ()
    rtol: ClassVar[float] = 1e-4
    atol: ClassVar[float] = 1e-5

    @pytest.fixture
    def penalty(self) -> KlPenalty:
        """Return the penalty under test; by default the plugin :attr:`name`."""
        if not self.name:
            raise NotImplementedError(f"{type(self).__name__} must set `name` or override the fixture `penalty`")
        return kl_penalties.get(self.name, requested_by=f"{type(self).__name__}.name")

    def inputs(self, penalty: KlPenalty, gap: float = 0.3, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Return log-probs of policy and reference for four rows of six tokens; they differ by about ``gap``."""
        generator = torch.Generator().manual_seed(seed)
        shape = (4, 6, 5) if needs_vocabulary(penalty) else (4, 6)
        if needs_vocabulary(penalty):
            ref = torch.randn(shape, generator=generator)
            return (ref + gap * torch.randn(shape, generator=generator)).log_softmax(-1), ref.log_softmax(-1)
        ref = -3 * torch.rand(shape, generator=generator) - 0.5
        return ref + gap * torch.randn(shape, generator=generator), ref

    def test_agrees_with_its_examples(self, penalty: KlPenalty) -> None:
        if not self.examples:
            pytest.skip("the suite has no examples")
        for number, (log_probs, ref, worked_out) in enumerate(self.examples):
            self._require_close(penalty(log_probs, ref), worked_out, f"example {number} gives the hand-computed values")

    def test_gives_a_float_for_each_token(self, penalty: KlPenalty) -> None:
        log_probs, ref = self.inputs(penalty)
        out = penalty(log_probs, ref)
        require(isinstance(out, Tensor), f"returns a tensor, not a {type(out).__name__}")
        require(list(out.shape) == [4, 6], f"the result is [4, 6], not {list(out.shape)}")
        require(out.dtype in (torch.float32, torch.float64), f"the result is float32 or wider, not {out.dtype}")

    def test_is_zero_where_the_policies_are_equal(self, penalty: KlPenalty) -> None:
        log_probs, _ = self.inputs(penalty)
        out = penalty(log_probs, log_probs.clone())
        self._require_close(out, torch.zeros_like(out), "equal policies have no divergence")

    def test_grows_with_the_distance(self, penalty: KlPenalty) -> None:
        means = [float(penalty(*self.inputs(penalty, gap)).abs().mean()) for gap in (0.05, 0.2, 0.8)]
        require(means[0] < means[1] < means[2], f"mean values {means} grow with the distance of the policies")

    def test_is_never_negative(self, penalty: KlPenalty) -> None:
        if not self.never_negative:
            pytest.skip("never_negative is False")
        for gap in (0.01, 0.3, 3.0):
            least = float(penalty(*self.inputs(penalty, gap)).min())
            require(least >= -1e-6, f"with never_negative no value is below 0; one is {least}")

    def test_its_mean_is_the_divergence(self, penalty: KlPenalty) -> None:
        if not self.unbiased:
            pytest.skip("unbiased is False")
        logits, ref = _two_policies()
        expected, actual = _divergence(logits, ref), _expectation(penalty, logits, ref)
        self._require_close(actual, expected, "with unbiased, the expected value is the divergence")

    def test_its_gradient_is_the_divergences(self, penalty: KlPenalty) -> None:
        if not self.unbiased_gradient:
            pytest.skip("unbiased_gradient is False")
        logits, ref = _two_policies()
        gradients = []
        for compute in (_divergence(logits, ref), _expectation(penalty, logits, ref)):
            require(compute.requires_grad, "with unbiased_gradient, there is a gradient")
            gradients.append(torch.autograd.grad(compute.sum(), logits)[0])
        law = "with unbiased_gradient, the expected gradient is the divergence's"
        self._require_close(gradients[1], gradients[0], law)

    def test_is_finite_at_extreme_distances(self, penalty: KlPenalty) -> None:
        log_probs, ref = self.inputs(penalty)
        for distance in (0.0, 30.0, -30.0, 1e4, -1e4):
            moved = log_probs.clone()
            moved[..., 0] = ref[..., 0] + distance
            leaf = moved.requires_grad_()
            out = penalty(leaf, ref)
            require(bool(out.isfinite().all()), f"values are finite at the distance {distance}")
            if out.requires_grad:
                (gradient,) = torch.autograd.grad(out.sum(), leaf)
                require(bool(gradient.isfinite().all()), f"gradients are finite at the distance {distance}")

    def test_treats_each_token_alone(self, penalty: KlPenalty) -> None:
        # The trainer calls a penalty with padded rows, or with all tokens of a batch in one row.
        log_probs, ref = self.inputs(penalty)
        whole = penalty(log_probs, ref)
        for row in range(4):
            alone = penalty(log_probs[row : row + 1, 2:4], ref[row : row + 1, 2:4])
            self._require_close(alone, whole[row : row + 1, 2:4], "a token alone has the value that it has in a batch")
        flat = penalty(*(tensor.reshape(1, 24, *tensor.shape[2:]) for tensor in (log_probs, ref)))
        self._require_close(flat, whole.reshape(1, 24), "tokens in one row have the values that they have in a batch")

    def test_takes_half_precision(self, penalty: KlPenalty) -> None:
        for dtype in (torch.bfloat16, torch.float16):
            half = [value.to(dtype) for value in self.inputs(penalty)]
            actual, wide = penalty(*half), penalty(*(tensor.float() for tensor in half))
            close = torch.allclose(actual.float(), wide, rtol=0.02, atol=0.02)
            require(close, f"values for {dtype} are those of the same numbers in float32")

    def test_is_deterministic_and_leaves_its_inputs_alone(self, penalty: KlPenalty) -> None:
        log_probs, ref = self.inputs(penalty)
        before = copy.deepcopy((log_probs, ref))
        first, second = penalty(log_probs, ref), penalty(log_probs, ref)
        require(torch.equal(first, second), "the same inputs give the same bits")
        require(
            all(torch.equal(left, right) for left, right in zip(before, (log_probs, ref), strict=True)),
            "the inputs are not modified",
        )

    def _require_close(self, actual: Tensor, expected: Tensor, law: str) -> None:
        __tracebackhide__ = True
        expected = expected.to(actual.dtype)
        torch.testing.assert_close(
            actual, expected, rtol=self.rtol, atol=self.atol, msg=lambda text: f"failed check: {law}\n{text}"
        )


def _two_policies() -> tuple[Tensor, Tensor]:
    """Return logits ``[3, 5]`` with gradient, and a reference's log-probs, both float64."""
    generator = torch.Generator().manual_seed(3)
    ref = torch.randn((3, 5), generator=generator, dtype=torch.float64)
    logits = ref + 0.3 * torch.randn((3, 5), generator=generator, dtype=torch.float64)
    return logits.requires_grad_(), ref.log_softmax(-1)


def _divergence(logits: Tensor, ref: Tensor) -> Tensor:
    log_probs = logits.log_softmax(-1)
    return (log_probs.exp() * (log_probs - ref)).sum(-1)


def _expectation(penalty: KlPenalty, logits: Tensor, ref: Tensor) -> Tensor:
    """Return the expected penalty, ``[3]``; gradients do not pass through the probability of drawing a token."""
    log_probs = logits.log_softmax(-1)
    if needs_vocabulary(penalty):
        return penalty(log_probs.unsqueeze(1), ref.unsqueeze(1)).squeeze(1)
    return (log_probs.detach().exp() * penalty(log_probs, ref)).sum(-1)
