"""Every path of the FSDP engine on a device runs, without faults, and moves no more than it has to."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

pytest.importorskip("rollcast_fsdp")
pytest.importorskip("transformers")

from rollcast_dryrun.process import MockProcess


def table() -> list[Any]:
    # The table needs torch, which a process imports after the mock; this one has no mock and only lists cells.
    from rollcast_dryrun.cells import fsdp_cells

    return [pytest.param(cell, id=cell.name) for cell in fsdp_cells()]


@pytest.mark.cases(1)
@pytest.mark.parametrize("cell", table())
def test_a_step(mock_process: MockProcess, cell: Any) -> None:
    if cell.model_keys.get("use_liger"):
        pytest.importorskip("triton")
        pytest.importorskip("liger_kernel")
    record = mock_process.call("rollcast_dryrun.engines:record_engine", asdict(cell))
    assert record["faults"] == []
    launched = record["phases"]["forward_backward"]["kernels"]
    assert bool(launched) == bool(cell.model_keys.get("use_liger")), launched
    # With the policy, FSDP2 waits for each gradient that it adds to the last micro-batch's on the host.
    names = ("infer",) if cell.keys.get("offload_policy") else ("infer", "forward_backward")
    passes = [record["phases"][name] for name in names]
    # Weights that leave the device after a pass are waited for, once.
    most = 1 if cell.keys.get("param_offload") else 0
    assert all(sum(phase["host_waits"].values()) <= most for phase in passes)
    # Counts are agreed on before a pass, and metrics read after it: nothing for each micro-batch.
    if not cell.model.endswith("_vl"):  # transformers reads the sizes of images from the device
        assert all(sum(phase["host_reads"].values()) <= 6 for phase in passes)
    # Only counts are sent in passing, not what grows with the batch; outputs come after the last micro-batch.
    waited = [copy for phase in passes for copy in phase["copies"] if copy["blocking"] and copy["bytes"] > 1024]
    assert [copy for copy in waited if not copy["place"].endswith(" in column")] == []


def test_layers_are_gathered_twice_and_reduced_once(mock_process: MockProcess) -> None:
    """With resharding: once for the forward pass and once for the backward pass of each micro-batch."""
    layers = 3
    cell = {
        "engine": "fsdp",
        "keys": {"param_dtype": "bf16", "use_remove_padding": True, "enable_gradient_checkpointing": True},
        "changes": {"num_hidden_layers": layers},
        "world": 8,
    }
    record = mock_process.call("rollcast_dryrun.engines:record_engine", cell)
    micro_batches = 2  # of two rows each
    calls = {found["kind"]: found["calls"] for found in record["phases"]["forward_backward"]["collectives"]}
    # The root, with embedding and head, is gathered once for both; one more agrees on the counts of the ranks.
    gathers = micro_batches * (2 * layers + 1) + 1
    assert calls == {"all_gather": gathers, "reduce_scatter": micro_batches * (layers + 1)}


def test_offloaded_state_leaves_the_device(mock_process: MockProcess) -> None:
    for world in (1, 8):
        sizes = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 128}
        cell = {"engine": "fsdp", "keys": {"param_dtype": "bf16"}, "world": world, "changes": sizes}
        phases = mock_process.call("rollcast_dryrun.engines:record_engine", cell)["phases"]
        assert phases["offload"]["allocated"] < 0.02 * phases["sync"]["allocated"]
        assert phases["load"]["allocated"] == pytest.approx(phases["sync"]["allocated"], rel=0.05)
        assert all(copy["pinned"] and not copy["blocking"] for copy in phases["offload"]["copies"])
