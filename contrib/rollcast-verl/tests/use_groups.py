"""Calls, failures and colocation of verl's worker groups on rollcast; test_verl_groups runs it."""

from __future__ import annotations

import gc
import sys
import time

import ray
import torch
from verl import DataProto
from verl.protocol import DataProtoFuture
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.single_controller.ray import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    create_colocated_worker_cls,
)

from rollcast.errors import DispatchError, WorkerError


@ray.remote
class Actor(Worker):
    def __init__(self, factor=2):
        super().__init__()
        self.factor = factor
        self._register_dispatch_collect_info("train", dp_rank=0, is_collect=self.rank == 1)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    async def multiply(self, data):
        data.batch["x"] *= self.factor
        return data

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("train"))
    def where(self, data):
        return DataProto.from_dict({"rank": torch.full((len(data),), self.rank), "x": data.batch["x"]})

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def first(self, x):
        return self.rank, x

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def count(self, data):
        return len(data)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail(self):
        if self.rank == 1:
            raise ValueError("no luck")

    def beside(self):
        return sorted(self.fused_worker_dict)


ray.init(num_cpus=16)
pool = RayResourcePool([2], use_gpu=False, max_colocate_count=3)
two = RayWorkerGroup(pool, RayClassWithInitArgs(Actor, 2), name_prefix="two")
three = RayWorkerGroup(pool, RayClassWithInitArgs(Actor, factor=3), name_prefix="three")

data = DataProto.from_dict({"x": torch.arange(6)})
middle = two.multiply(data)
assert isinstance(middle, DataProtoFuture) and middle.futures
assert three.multiply(middle).get().batch["x"].tolist() == [0, 6, 12, 18, 24, 30]
assert middle.get().batch["x"].tolist() == [0, 2, 4, 6, 8, 10]  # `three` wrote to copies of its own
assert data.batch["x"].tolist() == [0, 1, 2, 3, 4, 5]

placed = two.where(middle)
assert placed.batch["rank"].tolist() == [1] * 6 and two._dispatch_info == {"train": [0, 0]}
assert two._collect_info == {"train": [False, True]}
assert two.first(7) == (0, 7)
assert two.count(data) == [3, 3]
assert two.execute_rank_zero_sync("first", 1) == (0, 1)
assert ray.get([worker.first.remote(rank) for rank, worker in enumerate(two.workers)])[1] == (1, 1)
assert ray.get(two.workers[1].__ray_call__.remote(lambda worker: worker.factor)) == 2

try:
    two.fail()
except WorkerError as error:
    assert "two.worker.fail failed on rank 1" in str(error) and "no luck" in str(error), error
else:
    raise AssertionError("fail() did not raise")
try:
    RayClassWithInitArgs(Actor).update_options({"num_cpus": 3})
except DispatchError as error:
    assert "num_cpus" in str(error)
else:
    raise AssertionError("options of Ray were taken")

parts = {"actor": RayClassWithInitArgs(Actor, 2), "critic": RayClassWithInitArgs(Actor, 5)}
both = RayWorkerGroup(pool, create_colocated_worker_cls(parts), name_prefix="both")
views = both.spawn(parts)
assert views["critic"].multiply(data).get().batch["x"].tolist() == [0, 5, 10, 15, 20, 25]
assert both.actor_multiply(data).get().batch["x"].tolist() == [0, 2, 4, 6, 8, 10]
assert views["critic"].where(data).batch["rank"].tolist() == [1] * 6
assert views["critic"]._dispatch_info == {"train": [0, 0]} and views["actor"]._dispatch_info == {}
assert views["actor"].execute_all_sync("beside") == [["actor", "critic"]] * 2
both.fuse(parts)
assert both.critic.first(1) == (0, 1)
try:
    both.spawn(["judge"])
except DispatchError as error:
    assert "no worker 'judge'" in str(error) and "actor, critic" in str(error)
group = both.group
del both, views
gc.collect()
for _ in range(200):
    if group._shared.closed:
        break
    time.sleep(0.1)
assert group._shared.closed, "the group goes on although nobody holds it"
ray.shutdown()
sys.stdout.write("all of it\n")
