"""Large results lie in memory of their own that differs in nothing but where it is."""

from __future__ import annotations

import pytest
import torch

from rollcast import DataProto
from rollcast.protocol import _memory as memory

DTYPES = [torch.int64, torch.float32, torch.bfloat16, torch.bool, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [3, 700])
def test_joined_and_picked_rows_are_torchs(dtype: torch.dtype, rows: int) -> None:
    torch.manual_seed(0)
    parts = [torch.randint(0, 2, (rows + i, 4096, 2)).to(dtype) for i in range(3)]
    whole = memory.concat(parts)
    assert torch.equal(whole, torch.cat(parts))
    index = torch.randint(0, len(whole), (len(whole),))
    assert torch.equal(memory.index_select(whole, index), whole.index_select(0, index))
    assert whole.is_contiguous()
    assert whole.data_ptr() % 64 == 0
    whole.zero_()


def test_gradients_still_flow() -> None:
    parts = [torch.ones(600, 4096, requires_grad=True) for _ in range(2)]
    memory.concat(parts).sum().backward()
    assert parts[0].grad is not None
    assert memory.index_select(parts[1], torch.tensor([0] * 600)).requires_grad


def test_rows_of_a_large_batch_come_back() -> None:
    batch = DataProto.from_dict(
        {
            "x": torch.randn(600, 4096),
            "r": torch.nested.nested_tensor([torch.randn(i, 8) for i in range(600)], layout=torch.jagged),
        },
        {"u": [str(i) for i in range(600)]},
    )
    order = torch.randperm(600)
    there_and_back = DataProto.concat(batch.reordered(order).chunk(4)).reordered(order.argsort())
    assert there_and_back.equal(batch)
