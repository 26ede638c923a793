"""The critic's loss: a worked table, its gradient, and independence of the split."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollcast.contracts.algorithm import Denominators
from rollcast.contracts.engine import LossInputs
from rollcast.errors import ColumnError
from rollcast_algorithms import ValueLoss, clipped_value_loss, seq_mean_token_mean, token_mean

NAN = float("nan")


def batch(seed: int = 0, rows: int = 5, width: int = 6) -> LossInputs:
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.rand(rows, width, generator=generator) < 0.6).long()
    drawn = [torch.randn(rows, width, generator=generator, dtype=torch.float64) for _ in range(3)]
    new, old, returns = (tensor.masked_fill(mask == 0, NAN) for tensor in drawn)
    counts = Denominators(float(mask.sum()), float(mask.any(-1).sum()), float(width))
    return LossInputs(None, None, new.requires_grad_(), mask, {"values": old, "returns": returns}, counts)


def test_worked_table() -> None:
    # Old value 1, clip at 0.5: predictions are kept in [0.5, 1.5].
    cases = [
        # prediction, return, loss, clipped
        (1.2, 2.0, 0.5 * 0.8**2, 0),
        (2.0, 2.0, 0.5 * 0.5**2, 1),  # right, but too far from the old value
        (2.0, 0.0, 0.5 * 2.0**2, 0),  # the plain error is the larger one
        (0.0, 0.0, 0.5 * 0.5**2, 1),
    ]
    predictions, returns, losses, clipped = (torch.tensor([column]) for column in zip(*cases, strict=True))
    out = clipped_value_loss(predictions, torch.ones(1, 4), returns, torch.ones(1, 4), 0.5)
    torch.testing.assert_close(out.losses, losses)
    assert out.metrics["vf_clipfrac"].tolist() == clipped.tolist()


def test_the_gradient_is_the_error_or_nothing_where_clipped() -> None:
    predictions = torch.tensor([[1.2, 2.0, 2.0]], requires_grad=True)
    out = clipped_value_loss(predictions, torch.ones(1, 3), torch.tensor([[2.0, 2.0, 0.0]]), torch.ones(1, 3), 0.5)
    (gradient,) = torch.autograd.grad(out.losses.sum(), predictions)
    torch.testing.assert_close(gradient, torch.tensor([[-0.8, 0.0, 2.0]]))


def run(loss: ValueLoss, inputs: LossInputs, owner: Tensor, parts: int) -> tuple[Tensor, dict[str, Tensor]]:
    assert inputs.values is not None
    leaf = inputs.values.detach().clone().requires_grad_()
    sums: dict[str, Tensor] = {}
    for part in range(parts):
        keep = owner == part
        columns = {name: column[keep] for name, column in inputs.columns.items()}
        out = loss(replace(inputs, values=leaf[keep], response_mask=inputs.response_mask[keep], columns=columns))
        out.loss.backward()  # type: ignore[no-untyped-call]
        for name, value in {"loss": out.loss.detach(), **out.metrics}.items():
            sums[name] = sums.get(name, torch.zeros((), dtype=torch.float64)) + value
    assert leaf.grad is not None
    return leaf.grad, sums


@pytest.mark.parametrize("aggregation", [token_mean, seq_mean_token_mean])
@given(seed=st.integers(0, 10_000), parts=st.integers(2, 7))
@settings(deadline=None, max_examples=25)
def test_it_is_the_same_however_the_batch_is_split(aggregation: object, seed: int, parts: int) -> None:
    inputs, loss = batch(seed), ValueLoss(aggregation, 0.3)  # type: ignore[arg-type]
    owner = torch.randint(0, parts, (5,), generator=torch.Generator().manual_seed(seed))
    gradient, sums = run(loss, inputs, owner, parts)
    expected_gradient, expected = run(loss, inputs, torch.zeros(5), 1)
    assert gradient.isfinite().all()
    assert (gradient[inputs.response_mask == 0] == 0).all()
    torch.testing.assert_close(gradient, expected_gradient)
    torch.testing.assert_close(sums, expected)
    assert set(sums) == {"loss", "critic/vf_loss", "critic/vf_clipfrac", "critic/vpred_mean"}


def test_it_survives_pickling() -> None:
    loss = ValueLoss(cliprange_value=0.2)
    assert pickle.loads(pickle.dumps(loss)) == loss


def test_it_says_what_is_missing() -> None:
    inputs = batch()
    with pytest.raises(ColumnError, match="needs the column 'returns'; the batch has: values"):
        ValueLoss()(replace(inputs, columns={"values": inputs.columns["values"]}))
    with pytest.raises(ValueError, match="which a language model does not give"):
        ValueLoss()(replace(inputs, values=None))
    with pytest.raises(ValueError, match="cliprange_value must be greater than 0, got 0"):
        ValueLoss(cliprange_value=0.0)(inputs)
    with pytest.raises(ValueError, match=r"returns is \[1, 2\], but the mask is \[1, 3\]"):
        clipped_value_loss(torch.ones(1, 3), torch.ones(1, 3), torch.ones(1, 2), torch.ones(1, 3), 0.5)
