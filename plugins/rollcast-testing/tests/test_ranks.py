"""Processes for tests of several ranks: who is called with what, and whose failure is told."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from rollcast.contracts.worker import WorkerContext
from rollcast_testing.ranks import Ranks


def add_up(context: WorkerContext, number: int) -> tuple[int, float]:
    if not dist.is_initialized():
        address = f"tcp://{context.master_addr}:{context.master_port}"
        dist.init_process_group("gloo", init_method=address, rank=context.rank, world_size=context.world_size)
    total = torch.tensor(float(number + context.rank))
    dist.all_reduce(total)
    return context.rank, float(total)


def fail_on_one(context: WorkerContext) -> int:
    if context.rank == 1:
        raise ValueError("rank one's own trouble")
    return context.rank


def fail_while_the_other_waits(context: WorkerContext) -> None:
    if context.rank == 1:
        raise ValueError("rank one's own trouble")
    time.sleep(60)


def die_while_the_other_waits(context: WorkerContext) -> None:
    if context.rank == 1:
        os._exit(1)
    time.sleep(60)


def test_a_failure_is_told_while_other_ranks_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that waits in a collective must hide neither the cause nor the next call."""
    monkeypatch.syspath_prepend(str(__file__).rsplit("/", 1)[0])
    import test_ranks as importable

    ranks = Ranks(grace_s=0.1)
    try:
        with pytest.raises(RuntimeError, match=r"(?s)ranks \[0\] of 2 .*rank 1: .*rank one's own trouble"):
            ranks.run(importable.fail_while_the_other_waits)
        with pytest.raises(RuntimeError, match=r"ranks \[0, 1\] of 2 died"):
            ranks.run(importable.die_while_the_other_waits)
        assert ranks.run(importable.add_up, number=5) == [(0, 11.0), (1, 11.0)]
    finally:
        ranks.close()


def test_ranks_of_changing_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(__file__).rsplit("/", 1)[0])
    import test_ranks as importable  # the processes find the functions by this name

    ranks = Ranks()
    try:
        assert ranks.run(importable.add_up, number=5) == [(0, 11.0), (1, 11.0)]
        assert ranks.run(importable.add_up, world_size=1, number=5) == [(0, 5.0)]
        with pytest.raises(RuntimeError, match=r"(?s)rank 1: .*rank one's own trouble"):
            ranks.run(importable.fail_on_one)
        assert ranks.run(importable.add_up, number=1) == [(0, 3.0), (1, 3.0)]
    finally:
        ranks.close()
