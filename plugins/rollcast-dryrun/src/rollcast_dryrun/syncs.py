"""Dry runs of weight syncs: both ends on one device, and what it holds from the training to the rollout."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from rollcast.contracts.weights import WeightReport
from rollcast_dryrun.engines import EngineCell, build_engine, own_groups
from rollcast_dryrun.harness import fake_cuda
from rollcast_dryrun.replica import DryReplica
from rollcast_serving.casting import WeightCast
from rollcast_serving.contracts.weight_sync import SyncSettings, weight_syncs

__all__ = ["SyncCell", "record_sync"]


@dataclass(frozen=True)
class SyncCell:
    """One dry run of a weight sync.

    Attributes:
        sync: registry name of the sync.
        engine: the engine that sends.
        bucket_bytes: largest size of a bucket.
        shards: ranks of the replica that share each matrix.
    """

    sync: str
    engine: EngineCell
    bucket_bytes: int = 64 << 20
    shards: int = 1

    @property
    def name(self) -> str:
        """The properties of the cell, in one line."""
        return f"{self.sync} {self.bucket_bytes >> 20} MiB to {self.shards}: {self.engine.name}"


def record_sync(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record of two syncs, of which the first opens what the second may use again, as a value of JSON.

    The entry ``held`` has the bytes that the trainer's process reserves on the device, and those that the replica's has
    allocated: ``asleep``, ``awake`` with the replica's weights, and ``synced``, when the cache wakes up.
    """
    sync_cell = SyncCell(**{**cell, "engine": EngineCell(**cell["engine"])})
    engine_cell = sync_cell.engine
    place = (engine_cell.world, engine_cell.rank, engine_cell.device, engine_cell.node_ranks)
    with fake_cuda(*place) as recorder, own_groups():
        engine = build_engine(engine_cell)
        engine.initialize()
        folder = Path(engine.setup.model.path)
        replica = DryReplica(folder, shards=sync_cell.shards, node="127.0.0.1")
        settings = SyncSettings(bucket_bytes=sync_cell.bucket_bytes, cast=WeightCast.of_model("bfloat16", str(folder)))
        sync = weight_syncs.get(sync_cell.sync)(engine, [replica], settings)

        def held() -> list[int]:
            torch.cuda.empty_cache()
            return [recorder.allocator.reserved, replica.recorder.allocator.allocated]

        steps = {"asleep": held()}
        replica.wake()
        steps["awake"] = held()
        for version in (1, 2):
            with recorder.phase("sync"), replica.recorder.phase("sync"):
                deliveries = asyncio.run(sync.sync(version))
        steps["synced"] = held()
        sync.close()
    faults = [*recorder.faults.values(), *replica.recorder.faults.values()]
    return {
        "faults": [f"{fault.text} ({fault.kind}, {fault.place})" for fault in faults],
        "reports": [asdict(report) if isinstance(report, WeightReport) else str(report) for report in deliveries],
        "held": steps,
        "trainer": recorder.phases["sync"].as_dict(),
        "replica": replica.recorder.phases["sync"].as_dict(),
    }
