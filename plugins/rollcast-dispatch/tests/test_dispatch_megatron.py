"""The Megatron modes: which rank gets what, and whose output counts."""

from __future__ import annotations

import pytest
from dispatch_functions import grid, numbered
from hypothesis import given, settings
from hypothesis import strategies as st

from rollcast.contracts.dispatch import MeshInfo, RankOutputs
from rollcast.errors import DispatchError
from rollcast_dispatch import (
    MegatronCompute,
    MegatronComputeProto,
    MegatronPpAsDp,
    MegatronPpAsDpProto,
    MegatronPpOnly,
)
from rollcast_testing.dispatch import FakeGroup

MODES = [MegatronCompute, MegatronComputeProto, MegatronPpAsDp, MegatronPpAsDpProto, MegatronPpOnly]
DIMENSIONS = ("tp", "dp", "pp")


def sent(calls) -> list:
    return [call.args[0] for call in calls.per_rank]


@st.composite
def grids(draw):
    """A grid of up to 3 x 3 x 3, in any order of the dimensions."""
    dp, pp, tp = (draw(st.integers(1, 3)) for _ in range(3))
    return (dp, pp, tp), grid(dp, pp, tp, draw(st.permutations(DIMENSIONS)))


def at(place: MeshInfo) -> tuple[int, int, int]:
    return place.dp_rank, place.coords["pp"], place.coords["tp"]


# -- written out ----------------------------------------------------------------------------------------

#: Megatron's own order: tensor-parallel ranks are neighbours, stages are far apart.
EIGHT = grid(dp=2, pp=2, tp=2)


def test_lists_by_data_parallel_rank() -> None:
    calls = MegatronCompute().distribute(FakeGroup(EIGHT), (["A", "B"],), {})
    assert sent(calls) == ["A", "A", "B", "B", "A", "A", "B", "B"]
    outputs = RankOutputs([f"of rank {rank}" for rank in range(8)], range(8), calls.state)
    assert MegatronCompute().join(FakeGroup(EIGHT), outputs) == ["of rank 4", "of rank 6"]


def test_lists_by_data_parallel_rank_and_stage() -> None:
    calls = MegatronPpAsDp().distribute(FakeGroup(EIGHT), (["A", "B", "C", "D"],), {})
    assert sent(calls) == ["A", "A", "C", "C", "B", "B", "D", "D"]
    outputs = RankOutputs([f"of rank {rank}" for rank in range(8)], range(8), calls.state)
    found = MegatronPpAsDp().join(FakeGroup(EIGHT), outputs)
    assert found == ["of rank 0", "of rank 4", "of rank 2", "of rank 6"]


def test_outputs_by_stage() -> None:
    calls = MegatronPpOnly().distribute(FakeGroup(EIGHT), ("names",), {"prefix": "p"})
    assert [(call.args, call.kwargs) for call in calls.per_rank] == [(("names",), {"prefix": "p"})] * 8
    outputs = RankOutputs([f"of rank {rank}" for rank in range(8)], range(8), calls.state)
    assert MegatronPpOnly().join(FakeGroup(EIGHT), outputs) == ["of rank 0", "of rank 4"]


@pytest.mark.parametrize(("mode", "shards"), [(MegatronComputeProto(), 2), (MegatronPpAsDpProto(), 4)])
def test_batches(mode, shards) -> None:
    group = FakeGroup(EIGHT)
    calls = mode.distribute(group, (numbered(7), "flag"), {})
    expected = {2: [[0, 1, 2, 3], [4, 5, 6, 6]], 4: [[0, 1], [2, 3], [4, 5], [6, 6]]}[shards]
    by_rank = {2: [0, 0, 1, 1, 0, 0, 1, 1], 4: [0, 0, 2, 2, 1, 1, 3, 3]}[shards]
    assert [shard["x"].tolist() for shard in sent(calls)] == [expected[shard] for shard in by_rank]
    answering = {2: {4, 6}, 4: {0, 2, 4, 6}}[shards]
    outputs = [call.args[0] if rank in answering else "not this" for rank, call in enumerate(calls.per_rank)]
    assert mode.join(group, RankOutputs(outputs, range(8), calls.state)).equal(numbered(7))


# -- laws -----------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(found=grids())
def test_where_values_go_and_come_from(found) -> None:
    (dp, pp, _), places = found
    group, ranks = FakeGroup(places), range(len(places))
    own_output = [f"rank {rank}" for rank in ranks]
    rank_at = {at(place): f"rank {rank}" for rank, place in enumerate(places)}

    def result(mode, *args):
        calls = mode.distribute(group, args, {})
        return calls, mode.join(group, RankOutputs(own_output, ranks, calls.state))

    calls, outputs = result(MegatronCompute(), list(range(dp)))
    assert sent(calls) == [place.dp_rank for place in places]
    assert outputs == [rank_at[shard, pp - 1, 0] for shard in range(dp)]
    values = [(shard, stage) for shard in range(dp) for stage in range(pp)]
    calls, outputs = result(MegatronPpAsDp(), values)
    assert sent(calls) == [at(place)[:2] for place in places]
    assert outputs == [rank_at[shard, stage, 0] for shard, stage in values]
    assert result(MegatronPpOnly(), 1)[1] == [rank_at[0, stage, 0] for stage in range(pp)]


@settings(deadline=None, max_examples=40)
@given(found=grids(), rows=st.integers(0, 20))
def test_stages_of_a_data_parallel_rank_get_neighbouring_shards(found, rows) -> None:
    (dp, pp, tp), places = found
    calls = MegatronPpAsDpProto().distribute(FakeGroup(places), (numbered(rows),), {})
    rank_at = {at(place): rank for rank, place in enumerate(places)}
    together = [sent(calls)[rank_at[shard, stage, tp - 1]]["x"] for shard in range(dp) for stage in range(pp)]
    assert [x for shard in together for x in shard.tolist()][:rows] == list(range(rows))
    assert {len(shard) for shard in together} == {-(-rows // (dp * pp))}


# -- meshes ---------------------------------------------------------------------------------------------


def test_further_dimensions_share_the_rows() -> None:
    """Context-parallel ranks get the same value, and the first of them answers."""
    places = [MeshInfo(dp, True, {"cp": cp}) for dp in range(2) for cp in (1, 0)]
    calls = MegatronCompute().distribute(FakeGroup(places), (["A", "B"],), {})
    assert sent(calls) == ["A", "A", "B", "B"]
    assert MegatronCompute().join(FakeGroup(places), RankOutputs(list("wxyz"), range(4), calls.state)) == ["x", "z"]


@pytest.mark.parametrize("mode", MODES)
def test_a_mesh_of_data_parallel_ranks_only_is_a_grid_too(mode) -> None:
    group = FakeGroup([MeshInfo(rank, True) for rank in (1, 0)])
    argument = numbered(2) if mode in (MegatronComputeProto, MegatronPpAsDpProto) else [0, 1]
    calls = mode("m").distribute(group, (argument,), {})
    assert group.asked == ["m"]
    outputs = mode("m").join(group, RankOutputs([["rank 0"], ["rank 1"]], (0, 1), calls.state))
    assert outputs == {
        MegatronPpOnly: [["rank 1"]],
        MegatronComputeProto: ["rank 1", "rank 0"],
        MegatronPpAsDpProto: ["rank 1", "rank 0"],
    }.get(mode, [["rank 1"], ["rank 0"]])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("places", "complaint"),
    [
        ([MeshInfo(0, True), MeshInfo(0, False)], "ranks 0 and 1 are both at dp 0, pp 0;"),
        ([MeshInfo(0, True), MeshInfo(2, True)], "a grid of dp 3 x pp 1 has 3 places, but there are 2 ranks"),
        (
            [MeshInfo(0, True, {"pp": 0, "tp": 0}), MeshInfo(0, True, {"pp": 1, "tp": 1})],
            "a grid of dp 1 x pp 2 x tp 2 has 4 places, but there are 2 ranks",
        ),
        (
            [MeshInfo(0, True, {"tp": 1}), MeshInfo(0, True, {"tp": 1}), MeshInfo(0, True)],
            "ranks 0 and 1 are both at dp 0, pp 0, tp 1",
        ),
    ],
)
def test_a_mesh_that_is_no_grid_is_refused(mode, places, complaint) -> None:
    with pytest.raises(DispatchError, match=rf"mesh 'm': {complaint}.*coords=\{{'tp': tp_rank, 'pp': pp_rank\}}"):
        mode("m").distribute(FakeGroup(places), (numbered(2),), {})


@pytest.mark.parametrize(("mode", "values"), [(MegatronCompute, 4), (MegatronPpAsDp, 2)])
def test_lists_of_another_length_are_refused(mode, values) -> None:
    needed = {MegatronCompute: "2 data-parallel ranks", MegatronPpAsDp: "4 pipeline stages of all data-parallel ranks"}
    with pytest.raises(DispatchError, match=rf"{mode.name}\('default'\): .*each of the {needed[mode]}, got a list of"):
        mode().distribute(FakeGroup(EIGHT), (list(range(values)),), {})
