"""rollcast's side of bench_verl.py."""

from __future__ import annotations

from _large_batch import columns, uids
from _plain_workers import Plain
from _side import serve

from rollcast import ClassWithInitArgs, DataProto, ResourcePool
from rollcast_ray import RayWorkerGroup
from rollcast_ray.runtime import RayRuntime

WORKERS = 4


def main() -> None:
    """Serve."""
    batch = DataProto.from_dict(columns(), non_tensors={"uid": uids()})
    with RayRuntime(num_cpus=WORKERS) as runtime:
        runtime.start()
        groups: list[RayWorkerGroup] = []

        def spawn() -> None:
            groups.append(RayWorkerGroup(ResourcePool([WORKERS]), ClassWithInitArgs(Plain), runtime=runtime))
            groups[-1].nothing()

        serve(
            {
                "spawn": spawn,
                "first": lambda: groups[-1].small(batch[:WORKERS]),
                "nothing": lambda: groups[-1].nothing(),
                "small": lambda: groups[-1].small(batch),
                "echo": lambda: groups[-1].echo(batch),
                "shutdown": lambda: groups.pop().shutdown(),
            }
        )


if __name__ == "__main__":
    main()
