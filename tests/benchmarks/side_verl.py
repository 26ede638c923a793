"""verl's side of bench_verl.py, in verl's environment: its public classes, as its users call them."""

from __future__ import annotations

import ray
from _large_batch import columns, uids
from _side import serve
from ray.util import remove_placement_group
from verl import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

WORKERS = 4


@ray.remote
class Plain(Worker):
    """The same as rollcast's."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def nothing(self) -> None:
        """An empty call."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def small(self, data: DataProto) -> DataProto:
        """One number a row."""
        return DataProto.from_dict({"score": data.batch["old_log_probs"][:, 0].clone()})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def echo(self, data: DataProto) -> DataProto:
        """The batch."""
        return data


def main() -> None:
    """Serve."""
    batch = DataProto.from_dict(columns(), non_tensors={"uid": uids()})
    ray.init(num_cpus=WORKERS, include_dashboard=False, address="local", logging_level="ERROR")
    groups: list[RayWorkerGroup] = []

    def spawn() -> None:
        pool = RayResourcePool([WORKERS], use_gpu=False, max_colocate_count=1)
        groups.append(RayWorkerGroup(pool, RayClassWithInitArgs(Plain), device_name="cpu"))
        groups[-1].nothing()

    def shutdown() -> None:
        group = groups.pop()
        for worker in group.workers:
            ray.kill(worker)
        for placed in group.resource_pool.pgs:
            remove_placement_group(placed)

    serve(
        {
            "spawn": spawn,
            "first": lambda: groups[-1].small(batch[:WORKERS]),
            "nothing": lambda: groups[-1].nothing(),
            "small": lambda: groups[-1].small(batch),
            "echo": lambda: groups[-1].echo(batch),
            "shutdown": shutdown,
        }
    )
    ray.shutdown()


if __name__ == "__main__":
    main()
