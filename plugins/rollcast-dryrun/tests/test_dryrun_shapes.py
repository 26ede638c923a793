"""Results that are made from remembered shapes are those that torch's fake tensors compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from rollcast_dryrun.schemas import leaves_of
from rollcast_dryrun.shapes import run_on_fakes

aten = torch.ops.aten
Make = Callable[..., torch.Tensor]
#: Operation, and its arguments made from fake tensors of the given sizes.
CASES: list[tuple[Any, Callable[[Make], list[Any]]]] = [
    (aten.add.Tensor, lambda make: [make(3, 4), make(4)]),
    (aten.add_.Tensor, lambda make: [make(3, 4), make(4)]),
    (aten.mul.Tensor, lambda make: [make(3, 4).t(), 2.0]),
    (aten.mm.default, lambda make: [make(3, 4), make(4, 5)]),
    (aten.view.default, lambda make: [make(3, 4), [2, 6]]),
    (aten.view.default, lambda make: [make(6, 4)[2:], [2, 8]]),
    (aten.transpose.int, lambda make: [make(3, 4)[1:], 0, 1]),
    (aten.slice.Tensor, lambda make: [make(3, 4)[:, 1:], 1, 1, 3]),
    (aten.expand.default, lambda make: [make(3, 1), [3, 5]]),
    (aten.select.int, lambda make: [make(3, 4), 0, 2]),
    (aten.split.Tensor, lambda make: [make(5, 4), 2]),
    (aten.unbind.int, lambda make: [make(2, 4)]),
    (aten._unsafe_view.default, lambda make: [make(3, 4), [12]]),
    (aten.cat.default, lambda make: [[make(3, 4), make(1, 4)], 0]),
    (aten.sum.dim_IntList, lambda make: [make(3, 4), [1], True]),
    (aten.topk.default, lambda make: [make(3, 4), 2]),
    (aten.empty_like.default, lambda make: [make(3, 4).t()]),
    (aten.native_layer_norm.default, lambda make: [make(3, 4), [4], make(4), None, 1e-5]),
    (aten._to_copy.default, lambda make: [make(3, 4)]),
    (aten.clone.default, lambda make: [make(3, 4)]),
    (aten._foreach_mul.Scalar, lambda make: [[make(3), make(2, 2)], 2.0]),
    (aten._foreach_mul_.Scalar, lambda make: [[make(3), make(2, 2)], 2.0]),
    (aten.t_.default, lambda make: [make(3, 4)]),
]


def described(result: Any, args: list[Any]) -> list[Any]:
    """What torch's operations can see of a result: layout, memory, and the arguments that it shares it with."""
    if result is None:
        return []
    inputs = [leaf for leaf in leaves_of(args) if isinstance(leaf, torch.Tensor)]
    described = []
    for part in result if isinstance(result, list | tuple) else [result]:
        assert isinstance(part, FakeTensor)
        storage = part.untyped_storage()
        shared = [leaf.untyped_storage()._cdata == storage._cdata for leaf in inputs]
        layout = (tuple(part.shape), part.stride(), part.storage_offset(), part.dtype, str(part.device))
        described.append((type(result), layout, storage.nbytes(), shared, [part is leaf for leaf in inputs]))
    return described


@pytest.mark.parametrize(("func", "arguments"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_second_call_has_the_same_results(
    func: Any, arguments: Callable[[Make], list[Any]], dtype: torch.dtype
) -> None:
    mode = FakeTensorMode()

    def make(*sizes: int) -> torch.Tensor:
        with mode:
            return torch.empty(sizes, dtype=dtype)

    def build() -> list[Any]:
        with mode:
            return arguments(make)

    args = build()
    with mode:
        expected = described(func(*args), args)
    for _ in range(3):
        args = build()
        assert described(run_on_fakes(mode, func, tuple(args), {}), args) == expected


def test_arguments_of_other_kinds_are_told_apart() -> None:
    mode = FakeTensorMode()
    with mode:
        whole, halved = torch.ones(4, dtype=torch.int64), torch.ones(4)
    assert run_on_fakes(mode, aten.mul.Tensor, (whole, 2), {}).dtype is torch.int64
    assert run_on_fakes(mode, aten.mul.Tensor, (whole, 2.0), {}).dtype is torch.float32
    assert run_on_fakes(mode, aten.mul.Tensor, (halved, True), {}).dtype is torch.float32
    assert run_on_fakes(mode, aten.sum.default, (whole,), {"dtype": torch.float64}).dtype is torch.float64
    assert run_on_fakes(mode, aten.sum.default, (whole,), {"dtype": torch.float32}).dtype is torch.float32
