"""Meta entries that differ by rank, and values that do not end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rollcast.errors import DataProtoError
from rollcast.protocol import DataProto, DataProtoFuture, meta_rules


def reply(**meta: Any) -> DataProto:
    return DataProto.from_dict({"x": torch.zeros(2)}, meta_info=meta)


def test_metrics_that_differ_by_rank_are_merged_by_name() -> None:
    first = {"loss": 1.0, "grad_max": 2, "lr/min": 0.5, "times": [1], "all": {"x": 1}, "name": "a", "mine": 3}
    second = {"loss": np.float32(2), "grad_max": 5, "lr/min": torch.tensor(0.25), "times": [2, 3], "all": {"x": 2}}
    members = [reply(metrics=first, step=7), reply(metrics={**second, "name": "b"}, step=7)]
    expected = {
        "loss": 1.5, "grad_max": 5.0, "lr/min": 0.25, "times": [1, 2, 3], "all": {"x": 1.5}, "name": "a", "mine": 3
    }  # fmt: skip
    assert DataProto.concat(members).meta_info == {"metrics": expected, "step": 7}
    assert first["times"] == [1]
    results = [DataProtoFuture(lambda _, member=member: member) for member in members]
    assert DataProtoFuture.concat(results).meta_info["metrics"] == expected


def test_equal_values_are_kept_without_a_rule() -> None:
    batch = reply(metrics={"loss": 1.0, "seen": 4}, other=[1])
    assert DataProto.concat(batch.chunk(2)).meta_info == batch.meta_info
    with pytest.raises(DataProtoError, match=r"'other' is \[1\] in one .* a rule: rollcast\.protocol\.meta_rules"):
        DataProto.concat([batch, reply(other=[2])])


def test_metrics_of_one_batch_that_is_joined_by_columns_have_to_agree() -> None:
    with pytest.raises(DataProtoError, match="joined: meta_info key 'metrics'"):
        reply(metrics={"a": 1}).joined(DataProto.from_dict({"y": torch.zeros(2)}, meta_info={"metrics": {"a": 2}}))


def test_rules_are_registered_replaced_and_removed() -> None:
    members = [reply(timing=1.0), reply(timing=3.0), reply()]
    with meta_rules.temporarily("timing", max):
        assert DataProto.concat(members).meta_info == {"timing": 3.0}
        with meta_rules.temporarily("timing", None), pytest.raises(DataProtoError, match="'timing'"):
            DataProto.concat(members)
        with pytest.raises(DataProtoError, match="'timing' has a rule; pass replace=True"):
            meta_rules.register("timing", min)
        meta_rules.register("timing", list, replace=True)
        assert DataProto.concat(members).meta_info == {"timing": [1.0, 3.0]}
        meta_rules.unregister("timing")
        with pytest.raises(DataProtoError, match=r"'timing' has no rule; there are rules of \['metrics'\]"):
            meta_rules.unregister("timing")
    with pytest.raises(DataProtoError, match="'timing'"):
        DataProto.concat(members)


def test_values_that_contain_themselves_are_refused_with_a_message(tmp_path) -> None:
    endless: list[Any] = []
    endless.append({"again": endless})
    other: list[Any] = []
    other.append({"again": other})
    says = "that contains itself or is nested more than"
    with pytest.raises(DataProtoError, match=f"meta_info key 'mine' holds a list {says}"):
        reply(mine=endless)
    left, right = (DataProto.from_dict(None, {"o": [value]}) for value in (endless, other))
    with pytest.raises(DataProtoError, match=f"a comparison holds a list {says}"):
        left.equal(right)
    with pytest.raises(DataProtoError, match=f"object column 'o' holds a list {says}"):
        left.save(tmp_path / "batch")
    assert left.equal(left)
