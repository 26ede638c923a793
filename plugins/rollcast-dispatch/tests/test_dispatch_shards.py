"""What is said of shards beyond the suite's laws: their sizes, the padding, the ranks of a mesh."""

from __future__ import annotations

import pytest
import torch
from dispatch_functions import numbered
from hypothesis import given, settings
from hypothesis import strategies as st

from rollcast import DataProto, Dispatch
from rollcast.contracts.dispatch import DispatchMode, MeshInfo, RankOutputs
from rollcast.errors import DataProtoError, DispatchError
from rollcast_dispatch import DpComputeProto, NdMesh
from rollcast_testing.dispatch import FakeGroup

law = settings(deadline=None, max_examples=60)
rows_and_ranks = {"rows": st.integers(0, 20), "ranks": st.integers(1, 6)}


def data_parallel(ranks: int) -> FakeGroup:
    return FakeGroup([MeshInfo(rank, True) for rank in range(ranks)])


def shards_of(calls) -> list[DataProto]:
    return [call.args[0] for call in calls.per_rank]


@pytest.fixture(params=[DpComputeProto(), NdMesh("m")], ids=["dp_compute_proto", "nd_mesh"])
def mode(request) -> DispatchMode:
    return request.param


# -- shards and padding -------------------------------------------------------------------------------


@law
@given(**rows_and_ranks)
def test_shards_are_equal_contiguous_and_as_small_as_can_be(rows, ranks) -> None:
    calls = DpComputeProto().distribute(data_parallel(ranks), (numbered(rows),), {})
    shards = shards_of(calls)
    assert [len(shard) for shard in shards] == [-(-rows // ranks)] * ranks
    sent = [x for shard in shards for x in shard["x"].tolist()]
    assert sent[:rows] == list(range(rows))
    assert sent[rows:] == [rows - 1] * (len(sent) - rows)


@law
@given(**rows_and_ranks)
def test_padded_rows_are_never_seen(rows, ranks) -> None:
    """Workers that mark the rows they were sent: the marks of repeated rows are gone."""
    group = data_parallel(ranks)
    calls = DpComputeProto().distribute(group, (numbered(rows),), {})
    count = iter(range(1000))
    marked = [
        shard.with_columns({"mark": torch.tensor([next(count) for _ in range(len(shard))])})
        for shard in shards_of(calls)
    ]
    out = DpComputeProto().join(group, RankOutputs(marked, range(ranks), calls.state))
    assert out["mark"].tolist() == list(range(rows))
    lists = DpComputeProto().join(group, RankOutputs([m["mark"].tolist() for m in marked], range(ranks), calls.state))
    assert lists == list(range(rows))


def test_rows_that_divide_are_sent_as_views(mode) -> None:
    batch = numbered(6)
    shards = shards_of(mode.distribute(data_parallel(3), (batch,), {}))
    assert [shard["x"].data_ptr() for shard in shards] == [batch["x"][i:].data_ptr() for i in (0, 2, 4)]


def test_padding_that_cannot_be_told_from_the_rest_is_an_error(mode) -> None:
    group = data_parallel(2)
    calls = mode.distribute(group, (numbered(3),), {})
    doubled = [shard.repeat(2) for shard in shards_of(calls)]
    with pytest.raises(
        DispatchError, match=r"3 rows were padded to 4, 2 for each of 2 shards, which returned \[4, 4\]"
    ):
        mode.join(group, RankOutputs(doubled, (0, 1), calls.state))
    with pytest.raises(DispatchError, match=r"returned \[3, 1\]"):
        mode.join(group, RankOutputs([numbered(3), numbered(1)], (0, 1), calls.state))
    with pytest.raises(DispatchError, match=r"returned \[1, 1\].*a number of rows that 2 divides"):
        mode.join(group, RankOutputs([["metrics"], ["metrics"]], (0, 1), calls.state))


def test_without_padding_any_number_of_rows_may_come_back(mode) -> None:
    group = data_parallel(2)
    calls = mode.distribute(group, (numbered(4),), {})
    out = mode.join(group, RankOutputs([shard.repeat(3) for shard in shards_of(calls)], (0, 1), calls.state))
    assert out["x"].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert mode.join(group, RankOutputs([[1], [2, 3]], (0, 1), calls.state)) == [1, 2, 3]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_no_rows_go_to_every_rank_and_all_come_back(mode, ranks) -> None:
    group = data_parallel(ranks)
    calls = mode.distribute(group, (numbered(0),), {})
    shards = shards_of(calls)
    assert [len(shard) for shard in shards] == [0] * ranks
    assert [shard.keys() for shard in shards] == [["x", "id"]] * ranks
    out = mode.join(group, RankOutputs(shards, range(ranks), calls.state))
    assert (len(out), out["x"].dtype, out.meta_info) == (0, torch.int64, {"t": [1]})
    assert mode.join(group, RankOutputs([[rank] for rank in range(ranks)], range(ranks), calls.state)) == [
        *range(ranks)
    ]


def test_every_batch_is_split_alike_and_other_values_go_to_all(mode) -> None:
    plan = {"anything": 1}
    calls = mode.distribute(data_parallel(2), (numbered(3), plan), {"more": numbered(3), "flag": True})
    for rank, call in enumerate(calls.per_rank):
        assert call.args[0]["x"].tolist() == call.kwargs["more"]["x"].tolist() == [[0, 1], [2, 2]][rank]
        assert call.args[1] is plan
        assert call.kwargs["flag"] is True


# -- results ------------------------------------------------------------------------------------------


def test_results_of_other_kinds(mode) -> None:
    group = data_parallel(2)
    state = mode.distribute(group, (numbered(2),), {}).state
    assert mode.join(group, RankOutputs([None, None], (0, 1), state)) is None
    with pytest.raises(DispatchError, match="joins DataProtos or lists, the workers returned NoneType, list"):
        mode.join(group, RankOutputs([None, []], (0, 1), state))
    with pytest.raises(DispatchError, match="the workers returned dict"):
        mode.join(group, RankOutputs([{}, {}], (0, 1), state))
    with pytest.raises(DataProtoError, match="meta"):
        odd = [numbered(1), DataProto.from_dict({"x": torch.arange(1)}, {"id": ["r"]}, {"t": 2})]
        mode.join(group, RankOutputs(odd, (0, 1), state))


def test_errors_say_what_to_do(mode) -> None:
    with pytest.raises(DispatchError, match=r"has none \(it has: int, str\); use Dispatch.ONE_TO_ALL"):
        mode.distribute(data_parallel(2), (1,), {"a": "b"})
    with pytest.raises(DispatchError, match=r"differ in length: \{'argument 0': 3, \"argument 'b'\": 5\}"):
        mode.distribute(data_parallel(2), (numbered(3),), {"b": numbered(5)})


def test_they_are_attributes_of_dispatch() -> None:
    assert isinstance(Dispatch.DP_COMPUTE_PROTO, DpComputeProto)
    assert isinstance(Dispatch.ND_MESH, NdMesh)
    assert Dispatch.ND_MESH.mesh_name == "default"


# -- meshes -------------------------------------------------------------------------------------------

#: dp_rank by rank, and the ranks that collect.
LAYOUTS = {
    "tp inside": ([0, 0, 1, 1, 2, 2], [0, 2, 4]),
    "tp outside": ([0, 1, 2, 0, 1, 2], [3, 4, 5]),
    "backwards": ([2, 2, 1, 1, 0, 0], [1, 2, 5]),
    "uneven": ([0, 1, 1, 1, 2, 0], [0, 3, 4]),
    "one shard": ([0, 0, 0], [1]),
    "all apart": ([0, 1, 2, 3], [0, 1, 2, 3]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [0, 1, 5, 12])
def test_ranks_of_one_shard_share_it_and_one_of_them_collects(layout, rows) -> None:
    dp_ranks, collecting = LAYOUTS[layout]
    group = FakeGroup([MeshInfo(dp_rank, rank in collecting) for rank, dp_rank in enumerate(dp_ranks)])
    calls = NdMesh("m").distribute(group, (numbered(rows),), {})
    assert group.asked == ["m"]
    shards = shards_of(calls)
    size = -(-rows // len(set(dp_ranks)))
    for rank, (dp_rank, shard) in enumerate(zip(dp_ranks, shards, strict=True)):
        assert shard is shards[dp_ranks.index(dp_rank)], rank
        assert (
            shard["x"].tolist()[: max(rows - dp_rank * size, 0)]
            == list(range(rows))[dp_rank * size : (dp_rank + 1) * size]
        )
    outputs = [
        shard.with_columns({"rank": torch.full((len(shard),), rank)}) if rank in collecting else f"garbage of {rank}"
        for rank, shard in enumerate(shards)
    ]
    out = NdMesh("m").join(group, RankOutputs(outputs, range(len(dp_ranks)), calls.state))
    assert out["x"].tolist() == list(range(rows))
    collector = {dp_ranks[rank]: rank for rank in collecting}
    assert out["rank"].tolist() == [collector[row // size] for row in range(rows)]


@pytest.mark.parametrize(
    ("places", "complaint"),
    [
        ([(0, True), (2, True)], r"ranks \[0, 2\]; they must be 0 to 1 without gaps"),
        ([(1, True), (1, False)], r"ranks \[1\]; they must be 0 to 0"),
        ([(0, True), (0, True)], r"exactly one rank of each .* ranks \[0, 0\]"),
        ([(0, True), (1, False)], r"exactly one rank of each .* ranks \[0\] \(all: \[0, 1\]\)"),
    ],
)
def test_a_mesh_that_makes_no_sense_is_refused(places, complaint) -> None:
    group = FakeGroup([MeshInfo(*place) for place in places])
    with pytest.raises(DispatchError, match=rf"mesh 'm': .*{complaint}"):
        NdMesh("m").distribute(group, (numbered(4),), {})
