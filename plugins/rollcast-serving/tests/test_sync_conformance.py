"""The weight syncs pass the suite that third parties are given, over real processes."""

from __future__ import annotations

from rollcast_serving.contracts.weight_sync import weight_syncs
from rollcast_serving.testing import WeightSyncSuite
from rollcast_testing.cuda import on_cuda


class TestSharedMemory(WeightSyncSuite):
    name = "shared_memory"


class TestDisk(WeightSyncSuite):
    name = "disk"


class TestDelta(WeightSyncSuite):
    name = "delta"


class TestCollective(WeightSyncSuite):
    name = "collective"
    shares_connection = True


@on_cuda
class TestCudaIpc(WeightSyncSuite):
    name = "cuda_ipc"
    device = "cuda"


@on_cuda
class TestSharedMemoryFromCuda(WeightSyncSuite):
    name = "shared_memory"
    device = "cuda"


@on_cuda
class TestDiskFromCuda(WeightSyncSuite):
    name = "disk"
    device = "cuda"


@on_cuda
class TestDeltaFromCuda(WeightSyncSuite):
    name = "delta"
    device = "cuda"


def test_every_sync_of_this_distribution_is_tested_here() -> None:
    ours = {name for name in weight_syncs.names() if weight_syncs.find(name).distribution == "rollcast-serving"}
    here = [case for case in globals().values() if isinstance(case, type) and issubclass(case, WeightSyncSuite)]
    assert {case.name for case in here if case is not WeightSyncSuite} == ours
