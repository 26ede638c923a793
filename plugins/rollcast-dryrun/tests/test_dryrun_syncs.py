"""Weight syncs on a device: both ends run, give back what they take, and order their work on shared memory."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

pytest.importorskip("rollcast_fsdp")
pytest.importorskip("transformers")

from rollcast_dryrun.process import MockProcess

MIB = 1 << 20


def table() -> list[Any]:
    from rollcast_dryrun.cells import sync_cells

    return [pytest.param(cell, id=cell.name) for cell in sync_cells()]


@pytest.mark.cases(1)
@pytest.mark.parametrize("cell", table())
def test_a_sync(mock_process: MockProcess, cell: Any) -> None:
    if cell.engine.engine == "megatron":
        pytest.importorskip("rollcast_megatron")
        pytest.importorskip("megatron.core")
    record = mock_process.call("rollcast_dryrun.syncs:record_sync", asdict(cell))
    assert record["faults"] == []
    (report,) = record["reports"]
    assert (report["version"], report["tensors"] > 4) == (2, True)
    asleep, awake, synced = (record["held"][moment] for moment in ("asleep", "awake", "synced"))
    # The trainer gives back all that the sync took; the replica holds its weights, and an adapter beside them.
    assert synced[0] <= asleep[0]
    assert synced[1] <= awake[1] + (2 * MIB if cell.engine.model_keys else 0)
    trainer, replica = record["trainer"], record["replica"]
    if sizes := cell.engine.changes if cell.bucket_bytes > 64 * MIB else {}:
        # What the plan counts: a bucket in float32 and the head, which does not fit into it, and the buffers.
        embedding = sizes["vocab_size"] * sizes["hidden_size"]
        planned = 2 * cell.bucket_bytes + 4 * embedding
        planned += (2 if cell.sync == "cuda_ipc" else 1) * max(cell.bucket_bytes, 2 * embedding)
        assert 0.5 * planned < trainer["peak_allocated"] - asleep[0] < 1.1 * planned
    if cell.sync == "cuda_ipc":
        # The buckets are the trainer's, and nothing of them passes the host but checksums.
        assert replica["peak_allocated"] <= replica["allocated"] + MIB + max(report["bytes"], 64 * MIB) // 64
    copied = sum(copy["bytes"] for phase in (trainer, replica) for copy in phase["copies"])
    sent = 2 * report["bytes"]  # in two syncs
    if cell.sync == "shared_memory":
        assert copied >= 2 * sent
    elif sent > 64 * MIB:
        assert copied < sent / 20
    # A wait for the checksum of each tensor and, without pinned memory, for its copy; an adapter has a base.
    each = (2 if cell.sync == "shared_memory" else 1) * (2 if cell.engine.model_keys else 1)
    assert sum(trainer["host_reads"].values()) <= 2 * each * report["tensors"] + 8


def test_the_weights_of_a_model_are_sent_in_its_bytes(mock_process: MockProcess) -> None:
    cell = {"sync": "cuda_ipc", "engine": {"engine": "fsdp", "keys": {"param_dtype": "bf16"}, "world": 8}}
    record = mock_process.call("rollcast_dryrun.syncs:record_sync", cell)
    (report,) = record["reports"]
    embedding, layer, norm = 256 * 64, 3 * 64 * 128 + 2 * (64 * 64 + 32 * 64), 64
    biases, norms = 64 + 2 * 32, 2 * norm
    # Matrices in bfloat16, and vectors in the actor's float32.
    assert report["bytes"] == 2 * (2 * embedding + 2 * layer) + 4 * (2 * (biases + norms) + norm)


@pytest.mark.parametrize(
    ("mistake", "kind"),
    [(None, None), ("unsettled", "race"), ("answered early", "race"), ("freed early", "open_handle")],
)
def test_planted_faults_of_shared_memory(mock_process: MockProcess, mistake: str | None, kind: str | None) -> None:
    faults = mock_process.call("dryrun_scenarios:hands_over", mistake)
    assert faults == ([kind] if kind else [])


def test_memory_that_no_process_may_open_any_more_is_taken_back(mock_process: MockProcess) -> None:
    held = mock_process.call("dryrun_scenarios:shares_and_frees")
    assert held == {"open": MIB, "closed": MIB, "collected": 0}
