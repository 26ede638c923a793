"""The five aggregations: a worked example, and that splitting a mini-batch changes nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollcast.contracts.algorithm import Denominators, LossAggregation
from rollcast_algorithms.aggregation import (
    seq_mean_token_mean,
    seq_mean_token_sum,
    seq_mean_token_sum_norm,
    token_mean,
    token_sum,
)

AGGREGATIONS = [token_mean, token_sum, seq_mean_token_sum, seq_mean_token_sum_norm, seq_mean_token_mean]
NAN = float("nan")


def count(mask: Tensor, max_tokens: float = 16) -> Denominators:
    return Denominators(float((mask != 0).sum()), float((mask != 0).any(-1).sum()), max_tokens)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        (token_mean, 12 / 4),
        (token_sum, 12.0),
        (seq_mean_token_sum, 12 / 2),
        (seq_mean_token_sum_norm, 12 / (2 * 16)),
        (seq_mean_token_mean, ((1 + 2 + 3) / 3 + 6) / 2),
    ],
)
def test_worked_example(aggregation: LossAggregation, expected: float) -> None:
    losses = torch.tensor([[1.0, 2.0, 3.0], [6.0, NAN, 9.0], [NAN, 5.0, 5.0]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]])
    assert aggregation(losses, mask, count(mask)).item() == pytest.approx(expected)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@given(seed=st.integers(0, 10_000), rows=st.integers(1, 8), parts=st.integers(1, 9))
@settings(deadline=None, max_examples=40)
def test_micro_batches_add_up(aggregation: LossAggregation, seed: int, rows: int, parts: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    losses = torch.randn(rows, 6, generator=generator, dtype=torch.float64)
    mask = (torch.rand(rows, 6, generator=generator) < 0.5).long()
    counts = count(mask)
    whole = losses.clone().requires_grad_()
    total = aggregation(whole, mask, counts)
    total.backward()  # type: ignore[no-untyped-call]

    pieces = losses.clone().requires_grad_()
    owner = torch.randint(0, parts, (rows,), generator=generator)
    shares = []
    for part in range(parts):  # some parts are empty, and rows are not contiguous
        share = aggregation(pieces[owner == part], mask[owner == part], counts)
        share.backward()  # type: ignore[no-untyped-call]
        shares.append(share.detach())
    torch.testing.assert_close(torch.stack(shares).sum(), total.detach())
    torch.testing.assert_close(pieces.grad, whole.grad)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_garbage_under_the_mask_does_not_leak(aggregation: LossAggregation) -> None:
    losses = torch.tensor([[1.0, NAN], [float("inf"), 2.0]], requires_grad=True)
    mask = torch.tensor([[1, 0], [0, 1]])
    result = aggregation(losses, mask, count(mask))
    (gradient,) = torch.autograd.grad(result, losses)
    assert result.isfinite()
    assert gradient.isfinite().all()
    assert (gradient[mask == 0] == 0).all()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_nothing_to_count_gives_zero_with_a_graph(aggregation: LossAggregation) -> None:
    losses = torch.tensor([[NAN, 1.0]], requires_grad=True)
    result = aggregation(losses, torch.zeros(1, 2), Denominators(0, 0, 0))
    result.backward()  # type: ignore[no-untyped-call]
    assert result.item() == 0
    assert losses.grad is not None
    assert losses.grad.tolist() == [[0, 0]]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_padding_rows_and_columns_change_nothing(aggregation: LossAggregation) -> None:
    losses, mask = torch.randn(3, 4), torch.tensor([[1, 1, 1, 0], [1, 0, 1, 1], [1, 0, 0, 0]])
    wide, wide_mask = (torch.nn.functional.pad(tensor, (0, 3, 0, 2)) for tensor in (losses, mask))
    counts = count(mask)
    assert counts == count(wide_mask)
    torch.testing.assert_close(aggregation(wide, wide_mask, counts), aggregation(losses, mask, counts))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_float32(aggregation: LossAggregation, dtype: torch.dtype) -> None:
    losses, mask = torch.ones(64, 2048, dtype=dtype), torch.ones(64, 2048, dtype=torch.bool)
    result = aggregation(losses, mask, count(mask))
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, aggregation(losses.float(), mask, count(mask)))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_shapes_are_never_broadcast(aggregation: LossAggregation) -> None:
    with pytest.raises(ValueError, match=r"losses is \[2, 1\], but the mask is \[2, 3\]"):
        aggregation(torch.ones(2, 1), torch.ones(2, 3), Denominators(6, 2, 3))
