"""No operation changes the DataProto that it is called on, or lets the result reach into it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from protocol_batches import sample, snapshot

from rollcast.protocol import DataProto

OPERATIONS: dict[str, Callable[[DataProto], Any]] = {
    "select": lambda dp: dp.select(["ids", "uid"]),
    "select all": lambda dp: dp.select(),
    "select meta": lambda dp: dp.select(meta_info_keys=["steps"]),
    "select_idxs": lambda dp: dp.select_idxs([3, 0]),
    "drop": lambda dp: dp.drop("ids"),
    "rename": lambda dp: dp.rename({"ids": "tokens"}),
    "joined": lambda dp: dp.joined(DataProto.from_dict({"z": torch.zeros(4)}, meta_info={"k": 1})),
    "joined overwrite": lambda dp: dp.joined(dp.with_columns(ids=torch.ones(4)), overwrite=True),
    "with_columns": lambda dp: dp.with_columns(z=[1, 2, 3, 4]),
    "slice": lambda dp: dp.slice(1, 3),
    "int": lambda dp: dp[0],
    "chunk": lambda dp: dp.chunk(2),
    "split": lambda dp: dp.split(3),
    "concat": lambda dp: DataProto.concat([dp, dp]),
    "concat one": lambda dp: DataProto.concat([dp]),
    "repeat": lambda dp: dp.repeat(2),
    "repeat once": lambda dp: dp.repeat(1),
    "reordered": lambda dp: dp.reordered([3, 2, 1, 0]),
    "pad": lambda dp: dp.pad_to_divisor(3)[0],
    "pad nothing": lambda dp: dp.pad_to_divisor(2)[0],
    "unpad": lambda dp: dp.unpad(1),
    "unpad nothing": lambda dp: dp.unpad(0),
    "make_iterator": lambda dp: list(dp.make_iterator(2, epochs=1, shuffle=True)),
    "to": lambda dp: dp.to("cpu"),
    "clone": lambda dp: dp.clone(),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "from_tensordict": lambda dp: DataProto.from_tensordict(dp.batch, dp.meta_info),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_results_share_no_structure(name: str) -> None:
    dp = sample(4)
    before = snapshot(dp)
    results = OPERATIONS[name](dp)
    assert snapshot(dp) == before
    results = [results] if isinstance(results, DataProto) else list(results)
    assert results
    for result in results:
        result.batch["added"] = torch.zeros(len(result))
        result.non_tensor_batch["more"] = ["x"] * len(result)
        result.meta_info["added"] = 1
        result.meta_info["steps"].append(3)
        if "uid" in result:
            del result.non_tensor_batch["uid"]
    assert snapshot(dp) == before
    # Nor do the results share structure with each other.
    assert all(result.meta_info["steps"] == [1, 2, 3] for result in results)


def test_construction_copies_its_meta() -> None:
    meta = {"steps": [1], "nested": {"a": {2}}, "pair": ([1],)}
    dp = DataProto(meta_info=meta)
    dp.meta_info["steps"].append(2)
    dp.meta_info["nested"]["a"].add(3)
    dp.meta_info["pair"][0].append(4)
    assert meta == {"steps": [1], "nested": {"a": {2}}, "pair": ([1],)}


def test_clone_owns_its_storage_and_slices_do_not() -> None:
    dp = sample(4)
    dp.clone().batch["ids"].fill_(-1)
    dp.clone().batch["ragged"].values().fill_(-1)
    assert dp["ids"].min() == 0
    assert dp["ragged"].values().min() == 0
    assert dp.clone()["ragged"].offsets().data_ptr() != dp["ragged"].offsets().data_ptr()
    assert dp[1:3]["ids"].data_ptr() == dp["ids"][1:].data_ptr()


def test_an_iterator_keeps_the_columns_it_began_with() -> None:
    dp = sample(4)
    batches = dp.make_iterator(2, epochs=1)
    dp.batch["late"] = torch.zeros(4)
    assert all("late" not in batch for batch in batches)
