"""The modes of rollcast-dispatch against the laws that every mode keeps."""

from __future__ import annotations

import re
from importlib.metadata import distribution
from pathlib import Path

import pytest
import torch
from dispatch_functions import doubled, grid

from rollcast import Dispatch
from rollcast_dispatch import NdMesh, TokenBalanced, make_nd_compute_dataproto_dispatch_fn
from rollcast_dispatch.megatron import PipelineGrid
from rollcast_testing import DispatchSuite

pytestmark = pytest.mark.long


class TestDpComputeProto(DispatchSuite):
    name = "dp_compute_proto"


class TestNdMesh(DispatchSuite):
    name = "nd_mesh"


class TestMeshOfAnotherName(DispatchSuite):
    @pytest.fixture
    def mode(self) -> NdMesh:
        return make_nd_compute_dataproto_dispatch_fn("actor")


class TestDpCompute(DispatchSuite):
    """Each rank gets its value of a list, and the outputs are a list."""

    name = "dp_compute"
    bad_arguments = ((3,), ([1, 2, 3, 4, 5],), ("abc",))

    def arguments(self, batch, world_size):
        return ([batch[rank::world_size] for rank in range(world_size)],)

    def expected(self, batch, world_size):
        return self.arguments(batch, world_size)[0]


class TestDpComputeProtoWithFunc(DispatchSuite):
    name = "dp_compute_proto_with_func"
    takes_keywords = False  # of the function; see test_dispatch_dp.py
    bad_arguments = ((), (doubled,), (doubled, 3), (3, 4))

    def arguments(self, batch, world_size):
        return (doubled, batch)


class TestDpComputeMetric(DispatchSuite):
    """Outputs are a list, with the rows that were padded."""

    name = "dp_compute_metric"

    def expected(self, batch, world_size):
        return batch.pad_to_divisor(world_size)[0].chunk(world_size)


class OverGrid(DispatchSuite):
    """A group is cut into dp x pp x tp in every way."""

    world_sizes = (1, 2, 4, 6)

    def answers(self, at, pp):
        return at["tp"] == 0 and at["pp"] == pp - 1

    def layouts(self, world_size):
        found = []
        for pp in (pp for pp in range(1, world_size + 1) if world_size % pp == 0):
            tps = [tp for tp in range(1, world_size // pp + 1) if world_size // pp % tp == 0]
            for number, tp in enumerate(tps):
                dp = world_size // pp // tp
                order = [("tp", "dp", "pp"), ("pp", "tp", "dp")][number % 2]
                found.append(grid(dp, pp, tp, order, lambda at, pp=pp: self.answers(at, pp)))
        return found

    def sizes(self, group):
        size = PipelineGrid("m", group.places)
        return size.dp_size, size.pp_size


class TestMegatronComputeProto(OverGrid):
    name = "megatron_compute_proto"


class TestMegatronCompute(OverGrid):
    name = "megatron_compute"
    bad_arguments = ((3,), (list(range(9)),))

    def arguments_on(self, batch, group):
        dp, _ = self.sizes(group)
        return ([batch[rank::dp] for rank in range(dp)],)

    def expected_on(self, batch, group):
        return self.arguments_on(batch, group)[0]


class SplitsStages(OverGrid):
    def answers(self, at, pp):
        return at["tp"] == 0

    def shard_of(self, place):
        return place.dp_rank, place.coords["pp"]


class TestMegatronPpAsDpProto(SplitsStages):
    name = "megatron_pp_as_dp_proto"


class TestMegatronPpAsDp(SplitsStages):
    name = "megatron_pp_as_dp"
    bad_arguments = ((3,), (list(range(9)),))

    def arguments_on(self, batch, group):
        dp, pp = self.sizes(group)
        return ([batch[shard :: dp * pp] for shard in range(dp * pp)],)

    def expected_on(self, batch, group):
        return self.arguments_on(batch, group)[0]


class TestMegatronPpOnly(OverGrid):
    """Takes anything, gives it to every rank, and answers with an output a stage."""

    name = "megatron_pp_only"
    bad_arguments = ()

    def answers(self, at, pp):
        return at["tp"] == 0 and at["dp"] == 0

    def shard_of(self, place):
        return "all"

    def expected_on(self, batch, group):
        return [batch] * self.sizes(group)[1]


class TestDirectRolloutMethod(DispatchSuite):
    """Takes anything, gives it to the rank that speaks for each replica, and answers with their outputs."""

    name = "direct_rollout_method"
    bad_arguments = ()

    def shard_of(self, place):
        return "all"

    def expected_on(self, batch, group):
        return [batch] * (max(place.dp_rank for place in group.places) + 1)


class Balanced(DispatchSuite):
    """Rows need lengths, and come back where they were."""

    def arguments(self, batch, world_size):
        return (self.expected(batch, world_size),)

    def expected(self, batch, world_size):
        lengths = batch["row"] * 7 % 5
        columns = {"attention_mask": (torch.arange(5) < lengths.unsqueeze(1)).long()}
        return batch.with_columns({**columns, "group": batch["row"] * 3 % 4})


class TestTokenBalanced(Balanced):
    name = "token_balanced"


class TestTokenBalancedOnAMesh(Balanced):
    @pytest.fixture
    def mode(self):
        return TokenBalanced("m")


class TestTokenBalancedWithGroups(Balanced):
    @pytest.fixture
    def mode(self):
        return TokenBalanced(group_key="group")


class TestTokenBalancedInUnequalShards(Balanced):
    @pytest.fixture
    def mode(self):
        return TokenBalanced(length_key="row", equal_size=False, group_key="group")


def test_every_mode_of_the_distribution_is_tested_and_described() -> None:
    entry_points = distribution("rollcast-dispatch").entry_points.select(group="rollcast.dispatch_modes")
    announced = {entry_point.name for entry_point in entry_points}
    suites = [value for value in globals().values() if isinstance(value, type) and issubclass(value, DispatchSuite)]
    assert announced == {suite.name for suite in suites if suite.name}
    rows = re.findall(r"^\| `([A-Z_]+)` \|", (Path(__file__).parents[1] / "README.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(name.upper() for name in announced)
    assert {name.upper() for name in announced} <= set(Dispatch)
