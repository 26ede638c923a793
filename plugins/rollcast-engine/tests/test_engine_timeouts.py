"""How long collectives may take."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from rollcast.contracts.rendezvous import set_timeouts
from rollcast.contracts.worker import WorkerContext
from rollcast_engine.process_group import join_process_group


@pytest.fixture
def group() -> Iterator[None]:
    join_process_group(WorkerContext())
    yield
    dist.destroy_process_group()


def test_all_groups_of_the_process_wait_as_long(group: None) -> None:
    part = dist.new_group([0])
    set_timeouts(12.0)
    for each in (dist.group.WORLD, part):
        assert each is not None
        assert each._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=12)
