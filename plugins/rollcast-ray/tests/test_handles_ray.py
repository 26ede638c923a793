"""Handles on Ray: rows go from worker to worker, and to the driver only where it reads them."""

from __future__ import annotations

import gc
import pickle
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from handle_workers import WIDTH, Actor, Critic

from rollcast import ClassWithInitArgs, DataProto, DataProtoFuture, ResourcePool, WorkerGroup
from rollcast.errors import DataProtoError, WorkerError
from rollcast.protocol._columns import column_nbytes
from rollcast.protocol._remote import StoredBatch
from rollcast_ray.runtime import RayRuntime

ROWS = 12


@pytest.fixture(scope="module")
def runtime() -> Iterator[RayRuntime]:
    with RayRuntime(num_cpus=6) as started:
        yield started


@pytest.fixture(scope="module")
def actor(runtime: RayRuntime) -> Iterator[WorkerGroup]:
    group = WorkerGroup(ResourcePool([2]), ClassWithInitArgs(Actor), runtime=runtime)
    yield group
    group.shutdown()


@pytest.fixture(scope="module")
def critic(runtime: RayRuntime) -> Iterator[WorkerGroup]:
    group = WorkerGroup(ResourcePool([3]), ClassWithInitArgs(Critic), runtime=runtime)
    yield group
    group.shutdown()


@pytest.fixture
def arrived(runtime: RayRuntime, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Column → bytes of it that came to the driver; ``""`` for everything else that came."""
    seen: dict[str, int] = {}

    def count(value: Any) -> None:
        if isinstance(value, StoredBatch):
            for name, column in value.columns.items():
                seen[name] = seen.get(name, 0) + column_nbytes(column)
        else:
            seen[""] = seen.get("", 0) + len(pickle.dumps(value))

    for name in ("fetch_rows", "gather"):
        original = getattr(runtime, name)

        def counted(refs: Any, timeout: Any, original: Any = original) -> Any:
            values = original(refs, timeout)
            for value in values:
                count(value)
            return values

        monkeypatch.setattr(runtime, name, counted)
    return seen


def prompts() -> DataProto:
    return DataProto.from_dict(
        {"prompts": torch.arange(ROWS * 4).reshape(ROWS, 4)}, {"uid": [f"u{row}" for row in range(ROWS)]}
    )


@pytest.mark.exhaustive
def test_a_round_moves_three_columns_to_the_driver_and_nothing_else(actor, critic, arrived) -> None:
    batch = actor.generate.remote(prompts()).select(["uid", "prompts", "responses", "score"])
    batch = batch.joined(actor.log_probs.remote(batch.select("responses")).select("old_log_probs"))
    batch = batch.joined(critic.values.remote(batch.select("responses")).select("values"))
    score, old, values = batch["score"], batch["old_log_probs"], batch["values"]
    advantages = score - values + 0 * old
    metrics = critic.update(batch.with_columns({"advantages": advantages}).drop(["uid"]))
    assert sum(rows for rows, _ in metrics) == ROWS
    assert sum(total for _, total in metrics) == pytest.approx(float(advantages.sum()))
    described = arrived.pop("")
    assert arrived == dict.fromkeys(("score", "old_log_probs", "values"), ROWS * 4)
    # Descriptions and metrics are a few hundred bytes a rank and column, whatever the batch holds.
    assert described < 20_000 < ROWS * WIDTH * 8


def test_what_another_group_computes_is_right_for_any_number_of_workers(actor, critic) -> None:
    for rows in (0, 6, 12):
        batch = actor.generate.remote(prompts().slice(0, rows))
        assert isinstance(batch, DataProtoFuture)
        there = critic.values(batch.select(["responses"]))
        here = batch.get()["responses"].float().mean(-1)
        assert torch.allclose(there["values"], here)


def test_a_method_may_take_the_remote_columns_themselves(actor, critic) -> None:
    batch = actor.generate.remote(prompts())
    assert critic.peek(batch) == ["True"] * 3
    assert sorted(uid for part in critic.first_uid(batch) for uid in part) == ["u0", "u4", "u8"]


def test_a_failed_call_is_told_when_the_handle_is_used(actor) -> None:
    handle = actor.break_down.remote(prompts())
    with pytest.raises(WorkerError, match="no luck"):
        len(handle)
    with pytest.raises(WorkerError, match="no luck"):
        handle.get()


def test_other_results_come_by_get(actor) -> None:
    handle = actor.count.remote(prompts())
    assert handle.get() == [6, 6]
    with pytest.raises(DataProtoError, match="returned a list"):
        handle.select("x")


def test_rows_are_lost_with_their_worker_and_that_is_said(runtime: RayRuntime) -> None:
    group = WorkerGroup(ResourcePool([1]), ClassWithInitArgs(Actor), runtime=runtime)
    handle = group.generate.remote(prompts()).wait()
    group.shutdown()
    deadline = time.monotonic() + 30
    with pytest.raises(WorkerError, match="lost with the worker"):
        while time.monotonic() < deadline:  # until Ray knows
            handle.select().local(timeout=20)
            time.sleep(0.1)


def test_kept_rows_are_freed_with_the_last_handle(actor, runtime: RayRuntime) -> None:
    import ray

    columns = list(actor.generate.remote(prompts()).wait().select().remote_columns().values())
    refs = [piece.ref.ref for column in columns for piece in column.rows.pieces]
    assert len(set(refs)) == 2  # one object a worker, whatever its columns
    assert len(ray.get(refs)) == len(refs)
    text = [ref.hex() for ref in refs]
    del refs, columns
    gc.collect()
    held = ray._private.worker.global_worker.core_worker.get_all_reference_counts()
    assert not [each for each in text if each in held]
