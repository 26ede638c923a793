"""Memory of a device that a dry run does not execute, as ``rollcast plan`` counts it."""

from __future__ import annotations

from collections.abc import Mapping

from rollcast.contracts.pools import ResourcePool
from rollcast_automap.memory.memory_facts import plan_memory
from rollcast_automap.memory.memory_model import measure_model
from rollcast_automap.memory.role_specs import find_model, read_role
from rollcast_dryrun.report import FIRST_SYNC
from rollcast_trainer.api import RunSettings

__all__ = ["beside"]

_PROCESS = "workers: context and libraries"


def beside(settings: RunSettings, pool: ResourcePool, device_bytes: int) -> tuple[int, dict[str, int]]:
    """Return the bytes of a worker's process beyond its tensors, and phase → bytes of the rollout on a device.

    The phase ``""`` stands for all that are not named.

    Args:
        settings: settings of the run.
        pool: pool of the device.
        device_bytes: memory of the device.
    """
    facts = {key: value for key, value, _ in plan_memory(settings, settings.algebra, [], device_bytes)}
    items: Mapping[str, int] = facts["pools"][pool.name]["items"]
    mine = {name.removeprefix("rollout: "): size for name, size in items.items() if name.startswith("rollout: ")}
    weights, cache = mine.get("weights", 0), mine.get("KV cache", 0)
    process, bucket = mine.get("context, libraries and graphs", 0), mine.get("sync bucket", 0)
    model, _ = find_model(settings)
    layout = None if model is None else read_role(settings, "rollout", measure_model(model), False).rollout
    releases = not settings.uses_replicas or (
        settings.rollout.mode == "hybrid" and layout is not None and layout.releases_memory
    )
    others = process if releases else process + weights + cache
    syncing = max(others, process + weights) + bucket
    phases = {"": others, "generate": process + weights + cache, "sync": syncing, FIRST_SYNC: syncing}
    return items.get(_PROCESS, 0), phases
