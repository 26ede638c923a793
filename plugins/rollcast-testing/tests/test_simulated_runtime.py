"""Groups of 1,024 ranks on 128 simulated nodes: dispatch, handles, failures, restarts, and the clock."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from rollcast import ClassWithInitArgs, Dispatch, ResourcePool, Worker, WorkerGroup, register
from rollcast.config import build_section, compose
from rollcast.contracts.dispatch import RankCall
from rollcast.contracts.runtime import runtimes
from rollcast.errors import ResourceError, WorkerError, WorkerTimeoutError
from rollcast.protocol import DataProto
from rollcast_testing import SimulatedRuntime

NODES, EACH = 128, 8
RANKS = NODES * EACH


class Ranked(Worker):
    """Answers with what it got and where it is; a mesh of tensor-parallel pairs."""

    def __init__(self, model_parallel: int = 1) -> None:
        self.calls = 0
        self.register_mesh("pairs", self.rank // model_parallel, self.rank % model_parallel == 0)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def add_rank(self, data: DataProto) -> DataProto:
        self.calls += 1
        return data.with_columns({"rank": torch.full((len(data),), self.rank)})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def count(self) -> int:
        self.calls += 1
        return self.calls

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail_on(self, rank: int) -> int:
        if self.rank == rank:
            raise ValueError(f"rank {rank} was told to")
        return self.rank


def make_batch(rows: int, tokens: int = 16) -> DataProto:
    return DataProto.from_dict({"row": torch.arange(rows), "x": torch.arange(rows * tokens).view(rows, tokens)})


@pytest.fixture(scope="module")
def cluster() -> Iterator[SimulatedRuntime]:
    with SimulatedRuntime(NODES, EACH) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def group(cluster: SimulatedRuntime) -> Iterator[WorkerGroup]:
    group = WorkerGroup(ResourcePool([EACH] * NODES), ClassWithInitArgs(Ranked), runtime=cluster, name="big")
    yield group
    group.shutdown()


def small(runtime: SimulatedRuntime, processes: list[int], name: str = "") -> WorkerGroup:
    return WorkerGroup(ResourcePool(processes), ClassWithInitArgs(Ranked), runtime=runtime, name=name)


def test_1024_ranks_split_a_batch_and_join_it_in_order(group: WorkerGroup) -> None:
    batch = make_batch(2 * RANKS)
    answer = group.add_rank(batch)
    assert torch.equal(answer["x"], batch["x"])
    assert torch.equal(answer["rank"], torch.arange(RANKS).repeat_interleave(2))
    assert [host.info.node for host in group.workers[:9]] == ["node-0"] * 8 + ["node-1"]


def test_a_handle_moves_no_row_to_the_driver_and_only_its_own_to_each_rank(
    cluster: SimulatedRuntime, group: WorkerGroup
) -> None:
    batch = make_batch(2 * RANKS)
    handle = group.add_rank.remote(batch).wait()
    cluster.traffic.clear()
    second = group.add_rank.remote(handle.select().drop(["rank"])).wait()
    # Rows stay with the rank that has them; only the descriptions of the handles travel.
    assert cluster.traffic.between_nodes < batch.nbytes * 0.01 + 5000 * RANKS
    assert cluster.traffic.within_nodes >= batch.nbytes
    assert torch.equal(second.get()["row"], batch["row"])


def test_the_bytes_of_a_batch_that_leaves_the_driver_are_counted(cluster: SimulatedRuntime, group: WorkerGroup) -> None:
    batch = make_batch(RANKS)
    cluster.traffic.clear()
    group.add_rank(batch)
    away = (NODES - 1) / NODES
    assert cluster.traffic.into_node[5] == batch.nbytes // NODES
    assert cluster.traffic.into_node[0] == (batch.nbytes + RANKS * 8) * away


def test_a_mesh_of_pairs_is_asked_once_and_joined(cluster: SimulatedRuntime, group: WorkerGroup) -> None:
    assert len({place.dp_rank for place in group.mesh("pairs")}) == RANKS
    assert group.mesh("pairs") is group.mesh("pairs")


def test_a_failure_names_rank_and_node_and_the_others_live_on(group: WorkerGroup) -> None:
    with pytest.raises(WorkerError, match="rank 1000 was told to") as caught:
        group.fail_on(1000)
    assert (caught.value.rank, caught.value.node) == (1000, "node-125")


def test_a_killed_rank_is_noticed_and_replaced(cluster: SimulatedRuntime, group: WorkerGroup) -> None:
    kept = group.add_rank.remote(make_batch(RANKS)).wait()
    starts = cluster.starts
    cluster.kill_rank(group, 17)
    assert group.lost_ranks == [17]
    with pytest.raises(WorkerError, match="died: it was killed") as caught:
        group.count()
    assert caught.value.rank == 17
    with pytest.raises(WorkerError, match=r"lost with the worker that held them .big, rank 17\)"):
        kept.get()
    group.restart()
    assert cluster.starts == starts + RANKS
    assert group.lost_ranks == []
    assert group.count() == [1] * RANKS


def test_a_group_leaves_a_lost_node_if_there_is_room() -> None:
    with SimulatedRuntime(4, 2) as cluster:
        group = small(cluster, [2, 2, 2])
        cluster.kill_node(1)
        assert [node.address for node in cluster.nodes()] == ["node-0", "node-2", "node-3"]
        assert group.lost_ranks == [2, 3]
        group.restart()
        assert [host.info.node for host in group.workers] == [f"node-{node}" for node in (0, 0, 2, 2, 3, 3)]
        assert group.count() == [1] * 6
        cluster.kill_node(3)
        with pytest.raises(ResourceError, match="2 of 4 nodes are alive"):
            group.restart()
        with pytest.raises(ResourceError, match="node 0 cannot be killed"):
            cluster.kill_node(0)


def test_a_death_in_the_middle_of_a_call_ends_it_at_that_moment() -> None:
    with SimulatedRuntime(2, 1, call_s={"worker.count": 10.0}) as cluster:
        group = small(cluster, [1, 1])
        assert group.count() == [1, 1]
        cluster.kill_rank(group, 1, at=14.0)
        with pytest.raises(WorkerError, match="died: it was killed"):
            group.count()
        assert cluster.now == 14.0


def test_independent_stages_overlap_and_a_rank_does_one_call_at_a_time() -> None:
    with SimulatedRuntime(2, 2, latency_s=0.1, call_s={"worker.count": 1.0}) as cluster:
        first, second = small(cluster, [2], "first"), small(cluster, [2], "second")
        handles = [each.execute_all_async("count") for each in (first, second)]
        assert [handle.get() for handle in handles] == [[1, 1], [1, 1]]
        assert cluster.now == pytest.approx(1.2)
        handles = [first.execute_all_async("count") for _ in range(2)]
        assert [handle.get() for handle in handles] == [[2, 2], [3, 3]]
        assert cluster.now == pytest.approx(1.2 + 2.2)


def test_bytes_take_time_and_a_deadline_passes_on_the_simulated_clock() -> None:
    with SimulatedRuntime(2, 1, bytes_per_s=1e3) as cluster:
        group, batch = small(cluster, [1, 1]), make_batch(2, 100)
        group.add_rank(batch)
        half = batch.nbytes / 2
        assert cluster.now == pytest.approx((half + half + 8) / 1e3)
        before = cluster.now
        with pytest.raises(WorkerTimeoutError, match=r"no answer within 0\.5 s from 1 of 2 ranks"):
            group.with_timeout(0.5).add_rank(batch)
        assert cluster.now == before + 0.5


def test_calls_that_wait_for_their_rank_can_be_cancelled() -> None:
    with SimulatedRuntime(1, 1, call_s={"worker.count": 1.0}) as cluster:
        group = small(cluster, [1])
        refs = [group.send("count", [(0, RankCall())])[0] for _ in range(2)]
        cluster.cancel(refs[1:], group.workers)
        assert cluster.gather(refs[:1], None) == [1]
        assert group.count() == [2]
        assert cluster.now == 2.0


def test_a_call_that_runs_is_interrupted_at_that_moment() -> None:
    with SimulatedRuntime(1, 1, call_s={"worker.count": 1.0}) as cluster:
        group = small(cluster, [1])
        ref = group.send("count", [(0, RankCall())])[0]
        cluster.advance(0.25)
        assert cluster.cancel([ref], group.workers) == ["interrupted"]
        assert group.count() == [1]
        assert cluster.now == 1.25


def test_polling_comes_to_an_end() -> None:
    with SimulatedRuntime(1, 1, call_s={"worker.count": 0.5}) as cluster:
        handle = small(cluster, [1]).execute_all_async("count")
        polls = 0
        while not handle.done():
            polls += 1
        assert 0 < polls <= 501


def test_a_pool_has_room_for_as_many_groups_as_it_says() -> None:
    with SimulatedRuntime(2, 4) as cluster:
        pool = ResourcePool([2, 2], max_colocate_count=2)
        for name in ("a", "b"):
            WorkerGroup(pool, ClassWithInitArgs(Ranked), runtime=cluster, name=name)
        with pytest.raises(ResourceError, match="a, b runs there, and max_colocate_count is 2"):
            WorkerGroup(pool, ClassWithInitArgs(Ranked), runtime=cluster, name="c")
        with pytest.raises(ResourceError, match="no node has 3 places left"):
            small(cluster, [3])


def test_it_is_chosen_by_config_like_any_runtime() -> None:
    config = compose(["runtime=simulated", "runtime.nodes=3", "runtime.kill_nodes_at_s={2: 5}"]).config
    runtime = runtimes.get(config.runtime.name)
    section = build_section(runtime.config_schema, config.runtime, "runtime")
    with runtime.from_config(section, processes=4) as cluster:
        assert len(cluster.nodes()) == 3
        assert isinstance(cluster, SimulatedRuntime)
        cluster.advance(5.0)
        assert [node.address for node in cluster.nodes()] == ["node-0", "node-1"]
