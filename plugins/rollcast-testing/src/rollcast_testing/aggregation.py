"""The conformance suite of loss aggregations, a class of pytest tests to inherit."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from rollcast.contracts.algorithm import Denominators, LossAggregation, loss_aggregations
from rollcast_testing.checks import require

__all__ = ["LossAggregationSuite"]


class LossAggregationSuite:
    """Conformance tests of one loss aggregation.

    Set :attr:`name`, or override the fixture :meth:`aggregation` with the function itself::

        class TestMyAggregation(LossAggregationSuite):
            name = "my-aggregation"
            is_mean = False

    The *weight* of a token is the derivative of the result with respect to the token's loss.
    """

    #: Name of the aggregation in ``rollcast.loss_aggregations``.
    name: ClassVar[str] = ""
    #: True if the weights of all tokens of a mini-batch add up to 1, so that the mean of a constant is the constant.
    is_mean: ClassVar[bool] = True
    #: Hand-computed examples: losses ``[B, T]``, mask ``[B, T]``, denominators, and the expected number.
    examples: ClassVar[Sequence[tuple[Tensor, Tensor, Denominators, float]]] = ()
    rtol: ClassVar[float] = 1e-5
    atol: ClassVar[float] = 1e-6

    @pytest.fixture
    def aggregation(self) -> LossAggregation:
        """Return the aggregation under test; by default the plugin :attr:`name`."""
        if not self.name:
            raise NotImplementedError(f"{type(self).__name__} must set `name` or override the fixture `aggregation`")
        return loss_aggregations.get(self.name, requested_by=f"{type(self).__name__}.name")

    def inputs(self, seed: int = 0) -> tuple[Tensor, Tensor, Denominators]:
        """Return losses and mask of five ragged rows, one with a gap, and their denominators."""
        lengths = torch.tensor([7, 3, 5, 1, 6])
        mask = (torch.arange(7) < lengths.unsqueeze(-1)).long()
        mask[2, 1:3] = 0  # a tool's answer inside a response
        losses = torch.randn((5, 7), generator=torch.Generator().manual_seed(seed))
        return losses, mask, Denominators(float(mask.sum()), 5.0, 9.0)

    def test_agrees_with_its_examples(self, aggregation: LossAggregation) -> None:
        if not self.examples:
            pytest.skip("the suite has no examples")
        for number, (losses, mask, counts, worked_out) in enumerate(self.examples):
            loss = aggregation(losses, mask, counts)
            self._require_close(loss, worked_out, f"example {number} gives the hand-computed number")

    def test_gives_one_float(self, aggregation: LossAggregation) -> None:
        losses, mask, counts = self.inputs()
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            out = aggregation(losses.to(dtype), mask, counts)
            require(isinstance(out, Tensor), f"returns a tensor, not a {type(out).__name__}")
            require(out.shape == (), f"the result is one number, a tensor [], not {list(out.shape)}")
            require(out.dtype in (torch.float32, torch.float64), f"for {dtype} it is float32 or wider, not {out.dtype}")

    def test_the_weights_add_up(self, aggregation: LossAggregation) -> None:
        _, mask, counts = self.inputs()
        total = float(self._weights(aggregation).sum())
        if self.is_mean:
            self._require_close(torch.tensor(total), 1.0, f"with is_mean, weights add up to 1, not {total}")
        loss = float(aggregation(torch.full(mask.shape, 2.5), mask, counts))
        self._require_close(torch.tensor(loss), 2.5 * total, "a constant loss gives the constant times all weights")

    def test_is_linear(self, aggregation: LossAggregation) -> None:
        losses, mask, counts = self.inputs()
        first, second = self._weights(aggregation, losses), self._weights(aggregation, 3 * losses - 1)
        self._require_close(first, second, "the weight of a token does not depend on losses")
        value = (first * torch.where(mask != 0, losses, 0.0)).sum()
        self._require_close(aggregation(losses, mask, counts), float(value), "the result is the weighted sum of losses")

    def test_weights_are_positive_under_the_mask_only(self, aggregation: LossAggregation) -> None:
        _, mask, _ = self.inputs()
        weights = self._weights(aggregation)
        require(bool((weights[mask == 0] == 0).all()), "a token where the mask is zero has the weight 0")
        require(bool((weights[mask != 0] > 0).all()), "every token where the mask is one has a weight above 0")

    def test_ignores_what_is_under_the_mask(self, aggregation: LossAggregation) -> None:
        losses, mask, counts = self.inputs()
        expected, weights = float(aggregation(losses, mask, counts)), self._weights(aggregation)
        for garbage in (1e30, float("inf"), float("nan")):
            dirty = losses.masked_fill(mask == 0, garbage)
            law = f"{garbage} under the mask changes nothing"
            self._require_close(aggregation(dirty, mask, counts), expected, law)
            self._require_close(self._weights(aggregation, dirty), weights, f"{law}, also not the gradient")

    def test_ignores_padding(self, aggregation: LossAggregation) -> None:
        losses, mask, counts = self.inputs()
        wide = [torch.nn.functional.pad(column, (0, 4)) for column in (losses, mask)]
        expected = float(aggregation(losses, mask, counts))
        self._require_close(aggregation(wide[0], wide[1], counts), expected, "padding on the right changes nothing")

    def test_ignores_the_masks_dtype(self, aggregation: LossAggregation) -> None:
        losses, mask, counts = self.inputs()
        expected = float(aggregation(losses, mask, counts))
        for dtype in (torch.bool, torch.float32):
            loss = aggregation(losses, mask.to(dtype), counts)
            self._require_close(loss, expected, f"a {dtype} mask means the same as an int64 one")

    def test_micro_batches_add_up(self, aggregation: LossAggregation) -> None:
        # What makes an update the same however a mini-batch is cut into micro-batches and ranks.
        losses, mask, counts = self.inputs()
        expected = float(aggregation(losses, mask, counts))
        for parts in ([[0], [1], [2], [3], [4]], [[4, 1], [3, 0, 2]], [[2, 3, 1, 0, 4]]):
            shares = [aggregation(losses[rows], mask[rows], counts) for rows in parts]
            total = torch.stack(shares).sum()
            self._require_close(total, expected, f"the shares of the micro-batches {parts} add up to the whole")

    def test_a_rollout_of_several_rows_counts_once(self, aggregation: LossAggregation) -> None:
        """Check that a rollout with two trajectories has the weights that it would have as one row."""
        losses, mask, counts = self.inputs()
        joined = aggregation(torch.cat([losses[:1], losses[1:2]], 1), torch.cat([mask[:1], mask[1:2]], 1), counts)
        tokens = mask[:2].sum().expand(2)
        loss = aggregation(losses[:2], mask[:2], replace(counts, sequence_tokens=tokens))
        law = "two rows of one rollout, with sequence_tokens, give what the rollout gives as one row"
        self._require_close(loss, float(joined), law)

    def test_rows_without_tokens_add_nothing(self, aggregation: LossAggregation) -> None:
        losses, mask, counts = self.inputs()
        expected = float(aggregation(losses[1:], mask[1:], counts))
        empty = mask.clone()
        empty[0] = 0
        self._require_close(aggregation(losses, empty, counts), expected, "a row without tokens adds 0")

    def test_a_batch_without_tokens_gives_zero(self, aggregation: LossAggregation) -> None:
        losses, mask, _ = self.inputs()
        leaf = losses.requires_grad_()
        out = aggregation(leaf, torch.zeros_like(mask), Denominators(0.0, 0.0, 9.0))
        require(float(out.detach()) == 0.0, f"without a token the result is 0, not {float(out.detach())}")
        require(out.requires_grad, "without a token there is a graph, because all ranks run backward")
        (gradient,) = torch.autograd.grad(out, leaf)
        require(bool((gradient == 0).all()), "without a token the gradient is 0")

    def test_leaves_its_inputs_alone(self, aggregation: LossAggregation) -> None:
        losses, mask, counts = self.inputs()
        before = copy.deepcopy((losses, mask))
        aggregation(losses, mask, counts)
        require(torch.equal(losses, before[0]) and torch.equal(mask, before[1]), "the inputs are not modified")

    def _weights(self, aggregation: LossAggregation, losses: Tensor | None = None) -> Tensor:
        default, mask, counts = self.inputs()
        leaf = (default if losses is None else losses).detach().clone().requires_grad_()
        out = aggregation(leaf, mask, counts)
        require(out.requires_grad, "the result depends on the losses")
        return torch.autograd.grad(out, leaf)[0]

    def _require_close(self, actual: Tensor, expected: Tensor | float, law: str) -> None:
        __tracebackhide__ = True
        wanted = expected if isinstance(expected, Tensor) else torch.tensor(expected, dtype=actual.dtype)
        torch.testing.assert_close(
            actual.detach(), wanted, rtol=self.rtol, atol=self.atol, msg=lambda text: f"failed check: {law}\n{text}"
        )
