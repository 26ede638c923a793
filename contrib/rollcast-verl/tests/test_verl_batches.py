"""verl's batches survive the way to a worker and back."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollcast import DataProto
from rollcast.errors import DataProtoError

verl = pytest.importorskip("verl")
tensordict = pytest.importorskip("tensordict")

from rollcast_verl import batches  # noqa: E402  # imports verl


@pytest.fixture(autouse=True)
def rule() -> None:
    batches.install_meta_rule()


def batch_of(rows: int = 4) -> object:
    objects = np.empty(rows, dtype=object)
    objects[:] = [{"turn": i, "text": ["a"] * i} for i in range(rows)]
    return verl.DataProto.from_dict(
        {"ids": torch.arange(rows * 3).view(rows, 3), "score": torch.rand(rows)},
        {"extra": objects, "number": np.arange(rows, dtype=np.int32), "name": np.array([f"n{i}" for i in range(rows)])},
        {"temperature": 0.7, "keys": ["x"]},
    )


def test_a_dataproto_comes_back_as_it_was() -> None:
    sent = batch_of()
    back = batches.to_verl(batches.from_verl(sent, rank=0))
    assert isinstance(back, verl.DataProto) and len(back) == 4
    assert torch.equal(back.batch["ids"], sent.batch["ids"])
    assert back.batch["ids"].data_ptr() == sent.batch["ids"].data_ptr()  # nothing is copied
    for name, column in sent.non_tensor_batch.items():
        assert back.non_tensor_batch[name].dtype == column.dtype, name
        assert back.non_tensor_batch[name].tolist() == column.tolist()
    assert back.meta_info == sent.meta_info
    back.non_tensor_batch["extra"][0] = None  # writeable, as verl's are


def test_a_batch_without_tensors_keeps_none() -> None:
    sent = verl.DataProto(batch=None, non_tensor_batch={"uid": np.array(["a", "b"], dtype=object)})
    back = batches.to_verl(batches.from_verl(sent, rank=0))
    assert back.batch is None and back.non_tensor_batch["uid"].tolist() == ["a", "b"]


def test_a_tensordict_comes_back_with_jagged_columns_and_values_of_the_whole() -> None:
    from verl.utils import tensordict_utils as tu

    parts = [torch.arange(2 * length).view(2, length) for length in (3, 1, 2)]
    nested = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
    flat = torch.nested.as_nested_tensor([torch.ones(2), torch.ones(5), torch.ones(1)], layout=torch.jagged)
    sent = tu.get_tensordict({"x": torch.rand(3, 2), "position_ids": nested, "ids": flat}, {"lr": 0.1})
    tu.assign_non_tensor(sent, turns=[[1], [], [2, 3]])
    back = batches.to_verl(batches.from_verl(sent, rank=0))
    assert isinstance(back, tensordict.TensorDict) and back.batch_size == sent.batch_size
    assert back["position_ids"]._ragged_idx == nested._ragged_idx
    for found, expected in zip(back["position_ids"].unbind(), parts, strict=True):
        assert torch.equal(found, expected)
    assert torch.equal(back["ids"].values(), flat.values())
    assert tu.get(back, "lr") == 0.1 and tu.get(back, "turns") == [[1], [], [2, 3]]


def test_rows_and_the_metrics_of_ranks_are_joined_as_verl_joins_them() -> None:
    parts = batch_of().chunk(2)
    for rank, part in enumerate(parts):
        part.meta_info = {"temperature": 0.7, "metrics": {"loss": float(rank), "lr": 0.5}}
    joined = DataProto.concat([batches.from_verl(part, rank) for rank, part in enumerate(parts)])
    back, expected = batches.to_verl(joined), verl.DataProto.concat(parts)
    assert (
        back.meta_info == expected.meta_info == {"temperature": 0.7, "metrics": {"loss": [0.0, 1.0], "lr": [0.5, 0.5]}}
    )
    assert torch.equal(back.batch["ids"], expected.batch["ids"])
    assert back.non_tensor_batch["name"].tolist() == expected.non_tensor_batch["name"].tolist()


def test_metadata_that_ranks_disagree_about_is_an_error() -> None:
    chunks = batch_of().chunk(2)
    chunks[1].meta_info = {"temperature": 1.0}
    parts = [batches.from_verl(chunk, rank) for rank, chunk in enumerate(chunks)]
    with pytest.raises(DataProtoError, match="ranks 0 and 1 returned different values for meta_info key 'temperature'"):
        batches.to_verl(DataProto.concat(parts))


def test_a_batch_for_rollcast_alone_has_verls_metadata() -> None:
    plain = batches.from_verl(batch_of())
    assert plain.meta_info == {"temperature": 0.7, "keys": ["x"]}
    back = batches.to_verl(plain)
    assert isinstance(back, verl.DataProto) and back.meta_info == plain.meta_info


def test_a_nested_tensordict_is_refused_by_name() -> None:
    inner = tensordict.TensorDict({"y": torch.ones(2)}, batch_size=[2])
    with pytest.raises(DataProtoError, match="key 'inside'"):
        batches.from_verl(tensordict.TensorDict({"inside": inner}, batch_size=[2]))
