"""Resource pools on Ray: placement groups."""

from __future__ import annotations

import time
from typing import Any

import ray
from ray.util import placement_group, placement_group_table, remove_placement_group

from rollcast.controller.resource_pool import ResourcePool
from rollcast.errors import ResourceError

__all__ = ["RayResourcePool"]


class RayResourcePool(ResourcePool):
    """A resource pool with Ray placement groups, one a node, made when they are first needed."""

    #: ``(processes, placement group)`` for each node, once they are made.
    placement_groups: list[tuple[int, Any]] | None = None

    def get_placement_groups(self, timeout: float = 300.0) -> list[tuple[int, Any]]:
        """``(processes, placement group)`` for each node, sorted by node address, so that ranks
        stay where they were after a restart.

        Raises:
            ResourceError: not placed before the deadline; says what is asked and what is free.
        """
        if self.placement_groups is None:
            bundle = {"CPU": self.cpus_per_process, **({"GPU": 1.0} if self.use_gpu else {})}
            groups = [
                (count, placement_group([dict(bundle) for _ in range(count)], strategy="STRICT_PACK"))
                for count in self.process_on_nodes
            ]
            deadline = time.monotonic() + timeout
            for _, group in groups:
                if not group.wait(max(deadline - time.monotonic(), 0.001)):
                    for _, made in groups:
                        remove_placement_group(made)
                    free = {k: v for k, v in ray.available_resources().items() if k in ("CPU", "GPU")}
                    raise ResourceError(
                        f"pool {self.name!r} ({list(self.process_on_nodes)} processes, each {bundle}) was not placed "
                        f"within {timeout:g} s; free in the cluster: {free}"
                    )
            self.placement_groups = sorted(groups, key=lambda entry: _node_address(entry[1]))
        return self.placement_groups

    def release(self) -> None:
        """Give the placement groups back."""
        for _, group in self.placement_groups or ():
            remove_placement_group(group)
        self.placement_groups = None


def _node_address(group: Any) -> str:
    node_id = placement_group_table(group)["bundles_to_node_id"][0]
    return next((n["NodeManagerAddress"] for n in ray.nodes() if n["NodeID"] == node_id), "")
