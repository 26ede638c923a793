"""A batch or a result that finds no room in Ray's object store."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from failure_workers import Patient

from rollcast import ClassWithInitArgs, DataProto, ResourcePool, WorkerGroup
from rollcast.errors import ResourceError, WorkerError
from rollcast_ray.runtime import RayRuntime


@pytest.fixture(scope="module")
def group() -> Iterator[WorkerGroup]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_local_fs_capacity_threshold", "0.0")  # as if the disk were full: nothing is spilled
        with RayRuntime(num_cpus=1, object_store_memory=100 << 20) as runtime:
            yield WorkerGroup(ResourcePool([1]), ClassWithInitArgs(Patient), runtime=runtime, name="g")


def rows(count: int) -> DataProto:
    return DataProto.from_dict({"i": torch.arange(count)})


def test_a_batch_that_does_not_fit_is_refused_with_the_numbers(group: WorkerGroup) -> None:
    batch = rows(40).with_columns({"x": torch.zeros(40, 1 << 20)})
    with pytest.raises(ResourceError, match=r"argument of worker\.small \(168 MB\) does not fit .*105 MB") as caught:
        group.small(batch)
    assert "runtime.object_store_memory" in str(caught.value)
    assert len(group.small(rows(4))) == 4


def test_a_result_that_does_not_fit_is_an_error_of_its_rank(group: WorkerGroup) -> None:
    with pytest.raises(
        WorkerError, match=r"g\.worker\.large failed on rank 0 .*result does not fit .*105 MB"
    ) as caught:
        group.with_timeout(60).large(rows(40))
    assert caught.value.cause_type in ("OutOfDiskError", "ObjectStoreFullError")
    assert len(group.large(rows(4))) == 4
    with pytest.raises(WorkerError, match="does not fit"):
        group.with_timeout(60).large.remote(rows(40)).get()
