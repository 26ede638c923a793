"""Batches of other frameworks in calls: split, padded and joined by a plugin, and seen by workers as they are."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from rollcast import Dispatch
from rollcast.contracts.dispatch import BatchType, MeshInfo, RankOutputs, batch_types
from rollcast.errors import DispatchError
from rollcast_testing.dispatch import FakeGroup


@dataclass
class Theirs:
    """The batch of another framework."""

    rows: list[int]


class TheirType(BatchType):
    kind = Theirs

    def length(self, value):
        return len(value.rows)

    def take(self, value, rows):
        return Theirs([value.rows[row] for row in rows])

    def concat(self, values):
        return Theirs([row for value in values for row in value.rows])


def test_a_batch_of_another_framework_is_split_padded_and_joined() -> None:
    mode, group = Dispatch.DP_COMPUTE_PROTO, FakeGroup([MeshInfo(0, True), MeshInfo(1, True)])
    batch = Theirs([1, 2, 3, 4, 5])
    with pytest.raises(DispatchError, match=r"the call has none \(it has: Theirs, int\)"):
        mode.distribute(group, (batch, 7), {})
    with batch_types.temporarily("theirs", TheirType):
        calls = mode.distribute(group, (batch, 7), {"other": batch})
        assert [call.args for call in calls.per_rank] == [(Theirs([1, 2, 3]), 7), (Theirs([4, 5, 5]), 7)]
        assert calls.per_rank[1].kwargs == {"other": Theirs([4, 5, 5])}
        outputs = [Theirs([row * 10 for row in call.args[0].rows]) for call in calls.per_rank]
        joined = mode.join(group, RankOutputs(outputs, [0, 1], calls.state))
        assert joined == Theirs([10, 20, 30, 40, 50])
        with pytest.raises(DispatchError, match=r"returned \[1, 3\]: padding cannot be told from rows"):
            mode.join(group, RankOutputs([Theirs([1]), outputs[1]], [0, 1], calls.state))
        with pytest.raises(DispatchError, match="differ in length"):
            mode.distribute(group, (batch,), {"other": Theirs([1])})
    assert "theirs" not in batch_types
