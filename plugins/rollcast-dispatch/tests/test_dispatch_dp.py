"""DP_COMPUTE, its kin with a function and with metrics, and DIRECT_ROLLOUT_METHOD, beyond the suite's laws."""

from __future__ import annotations

import pytest
from dispatch_functions import numbered
from hypothesis import given, settings
from hypothesis import strategies as st

from rollcast import ClassWithInitArgs, Dispatch, ResourcePool, Worker, WorkerGroup, register
from rollcast.contracts.dispatch import MeshInfo, RankOutputs
from rollcast.errors import DispatchError
from rollcast.runtime.local import LocalRuntime
from rollcast_dispatch import DirectRolloutMethod, DpCompute, DpComputeMetric, DpComputeProtoWithFunc
from rollcast_testing.dispatch import FakeGroup


def data_parallel(ranks: int) -> FakeGroup:
    return FakeGroup([MeshInfo(rank, True) for rank in range(ranks)])


# -- DP_COMPUTE -----------------------------------------------------------------------------------------


def test_dp_compute_gives_each_rank_its_values() -> None:
    calls = DpCompute().distribute(data_parallel(3), (["a", "b", "c"], (1, 2, 3)), {"key": [None, {}, []]})
    assert [(call.args, call.kwargs) for call in calls.per_rank] == [
        (("a", 1), {"key": None}),
        (("b", 2), {"key": {}}),
        (("c", 3), {"key": []}),
    ]
    outputs = RankOutputs([{"loss": 1}, None, 3], range(3), calls.state)
    assert DpCompute().join(data_parallel(3), outputs) == [{"loss": 1}, None, 3]


def test_dp_compute_without_arguments_calls_every_rank() -> None:
    calls = DpCompute().distribute(data_parallel(2), (), {})
    assert [(call.args, call.kwargs) for call in calls.per_rank] == [((), {})] * 2


@pytest.mark.parametrize(
    ("args", "kwargs", "complaint"),
    [
        (([1, 2, 3],), {}, r"argument 0 must be .* each of the 2 ranks, got a list of 3 values"),
        (([1, 2], "ab"), {}, "argument 1 .* got a str;"),
        ((), {"data": numbered(2)}, "argument 'data' .* got a DataProto; use Dispatch.ONE_TO_ALL"),
    ],
)
def test_dp_compute_refuses_other_arguments(args, kwargs, complaint) -> None:
    with pytest.raises(DispatchError, match=f"dp_compute: {complaint}"):
        DpCompute().distribute(data_parallel(2), args, kwargs)


# -- DP_COMPUTE_PROTO_WITH_FUNC -------------------------------------------------------------------------


def test_the_function_goes_to_all_ranks_and_the_batches_are_split() -> None:
    def score(worker, data, more, flag): ...

    calls = DpComputeProtoWithFunc().distribute(data_parallel(2), (score, numbered(3)), {"more": numbered(3), "f": 1})
    for rank, call in enumerate(calls.per_rank):
        assert call.args[0] is score
        assert call.args[1]["x"].tolist() == call.kwargs["more"]["x"].tolist() == [[0, 1], [2, 2]][rank]
        assert call.kwargs["f"] == 1


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        ((), "got no positional argument"),
        ((numbered(2), len), "the first positional argument must be the function .* got a DataProto"),
        ((len,), r"splits DataProto arguments, but the call has none \(it has: no argument\)"),
    ],
)
def test_a_call_without_function_or_batch_is_refused(args, complaint) -> None:
    with pytest.raises(DispatchError, match=f"dp_compute_proto_with_func.*{complaint}"):
        DpComputeProtoWithFunc().distribute(data_parallel(2), args, {})


def test_the_function_may_be_given_more_than_the_batch_by_the_worker() -> None:
    class Runs(Worker):
        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
        def run(self, function, data):
            return function(self, data)

    with LocalRuntime() as runtime:
        group = WorkerGroup(ResourcePool([1]), ClassWithInitArgs(Runs), runtime=runtime)
        shift = 5
        out = group.run(lambda worker, data: data.with_columns(y=data["x"] + worker.rank + shift), numbered(3))
    assert out["y"].tolist() == [5, 6, 7]


# -- DP_COMPUTE_METRIC ----------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(rows=st.integers(0, 12), ranks=st.integers(1, 5))
def test_metrics_come_back_one_a_rank(rows, ranks) -> None:
    group = data_parallel(ranks)
    calls = DpComputeMetric().distribute(group, (numbered(rows),), {})
    like_proto = Dispatch.DP_COMPUTE_PROTO.distribute(group, (numbered(rows),), {})
    shards = [call.args[0] for call in calls.per_rank]
    assert all(a.equal(b.args[0]) for a, b in zip(shards, like_proto.per_rank, strict=True))
    outputs = [{"rows": len(shard), "rank": rank} for rank, shard in enumerate(shards)]
    found = DpComputeMetric().join(group, RankOutputs(outputs, range(ranks), calls.state))
    assert found == outputs
    assert type(found) is list
    assert sum(metric["rows"] for metric in found) == -(-rows // ranks) * ranks


# -- DIRECT_ROLLOUT_METHOD ------------------------------------------------------------------------------


def test_only_the_rank_that_speaks_for_a_replica_is_called() -> None:
    # Two replicas of two ranks, laid across; the second rank of replica 1 and the first of 0 speak.
    group = FakeGroup([MeshInfo(1, False), MeshInfo(0, True), MeshInfo(1, True), MeshInfo(0, False)])
    request, batch = object(), numbered(3)
    calls = DirectRolloutMethod().distribute(group, (request, batch), {"flag": True})
    assert group.asked == ["rollout"]
    assert calls.per_rank[0] is calls.per_rank[3] is None
    for rank in (1, 2):
        assert calls.per_rank[rank].args[0] is request
        assert calls.per_rank[rank].args[1] is batch
        assert calls.per_rank[rank].kwargs == {"flag": True}
    outputs = RankOutputs(["of 0", {"of": 1}], (1, 2), calls.state)
    assert DirectRolloutMethod().join(group, outputs) == ["of 0", {"of": 1}]


def test_outputs_of_replicas_are_in_their_order() -> None:
    group = FakeGroup([MeshInfo(2, True), MeshInfo(0, True), MeshInfo(1, True)])
    calls = DirectRolloutMethod("m").distribute(group, (), {})
    assert DirectRolloutMethod("m").join(group, RankOutputs(["c", "a", "b"], range(3), calls.state)) == ["a", "b", "c"]


def test_a_replica_without_a_speaker_is_refused() -> None:
    group = FakeGroup([MeshInfo(0, True), MeshInfo(1, False)])
    with pytest.raises(DispatchError, match="mesh 'rollout': exactly one rank of each"):
        DirectRolloutMethod().distribute(group, (1,), {})


def test_a_direct_call_on_a_real_group() -> None:
    class Server(Worker):
        def __init__(self) -> None:
            self.register_mesh("rollout", 0)

        @register(dispatch_mode=Dispatch.DIRECT_ROLLOUT_METHOD)
        def abort(self, requests, reason="stop"):
            return requests, reason

    with LocalRuntime() as runtime:
        group = WorkerGroup(ResourcePool([1]), ClassWithInitArgs(Server), runtime=runtime)
        ((requests, reason),) = group.abort(["r0", "r1"], reason="late")
    assert (requests, reason) == (["r0", "r1"], "late")
