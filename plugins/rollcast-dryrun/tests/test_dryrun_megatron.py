"""Every path of the Megatron engine on a device runs, and no stream uses memory without an order."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

pytest.importorskip("rollcast_megatron")
pytest.importorskip("megatron.core")
pytest.importorskip("transformers")

from rollcast_dryrun.process import MockProcess

#: What waits in megatron-core for each micro-batch: stages of a pipeline tell each other its shapes, the rotary
#: embedding of packed rows that ranks share reads their lengths, and experts need the numbers of their tokens.
_WAITING = (
    *(" in _communicate_shapes", " in _apply_rotary_pos_emb_thd"),
    *(" in permute", " in _maybe_dtoh_and_synchronize"),
)


def ours(place: str) -> bool:
    return not place.endswith(_WAITING)


def table() -> list[Any]:
    from rollcast_dryrun.cells import megatron_cells

    return [pytest.param(cell, id=cell.name) for cell in megatron_cells()]


@pytest.mark.cases(1)
@pytest.mark.parametrize("cell", table())
def test_a_step(request: pytest.FixtureRequest, cell: Any) -> None:
    name = "transformer_engine_process" if cell.transformer_engine else "mock_process"
    process: MockProcess = request.getfixturevalue(name)
    record = process.call("rollcast_dryrun.engines:record_engine", asdict(cell))
    assert record["faults"] == []
    assert ("multi_tensor_adam" in record["phases"]["optimizer_step"]["kernels"]) == cell.transformer_engine
    assert record["phases"]["forward_backward"]["operations"] > 50
    passes = [record["phases"][name] for name in ("infer", "forward_backward")]
    # Weights that leave the device after a pass are waited for, once.
    most = 1 if cell.keys.get("param_offload") else 0
    assert all(sum(n for place, n in phase["host_waits"].items() if ours(place)) <= most for phase in passes)
    # Counts are agreed on before a pass, and outputs and metrics read after it: nothing for each micro-batch.
    assert all(sum(n for place, n in phase["host_reads"].items() if ours(place)) <= 6 for phase in passes)
    sent = [copy for phase in passes for copy in phase["copies"] if copy["blocking"] and copy["to_device"]]
    assert [copy for copy in sent if copy["bytes"] > 1024 and ours(copy["place"])] == []
    copies = [copy for phase in ("offload", "load") for copy in record["phases"][phase]["copies"]]
    assert all(copy["pinned"] and not copy["blocking"] for copy in copies)


def test_offloaded_state_leaves_the_device(mock_process: MockProcess) -> None:
    for world, tensor in ((1, 1), (8, 2)):
        cell = {
            "engine": "megatron",
            "keys": {"dtype": "bfloat16", "tensor_model_parallel_size": tensor, "sequence_parallel": tensor > 1},
            "changes": {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 128},
            "world": world,
        }
        phases = mock_process.call("rollcast_dryrun.engines:record_engine", cell)["phases"]
        # A run generates before it trains, so no gradients are there yet.
        assert phases["init"]["allocated"] == pytest.approx(phases["sync"]["allocated"], rel=0.05)
        assert phases["offload"]["allocated"] < 0.02 * phases["sync"]["allocated"]
        assert phases["load"]["allocated"] == pytest.approx(phases["sync"]["allocated"], rel=0.05)


def test_a_stage_of_a_pipeline_holds_its_part(mock_process: MockProcess) -> None:
    """Two stages of four layers hold about half of the layers each; the first has the embedding, the last the head."""
    held = {}
    for stages, rank in ((1, 0), (2, 0), (2, 1)):
        cell = {
            "engine": "megatron",
            "keys": {"dtype": "bfloat16", "pipeline_model_parallel_size": stages},
            "changes": {"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 1024, "head_dim": 64},
            "world": stages,
            "rank": rank,
        }
        phases = mock_process.call("rollcast_dryrun.engines:record_engine", cell)["phases"]
        held[stages, rank] = phases["sync"]["allocated"]
    assert held[2, 0] + held[2, 1] == pytest.approx(held[1, 0], rel=0.05)
    assert held[2, 0] == pytest.approx(held[2, 1], rel=0.05)


@pytest.mark.parametrize("model", ["qwen2", "qwen3", "qwen3_moe", "glm4_moe", "deepseek_v3"])
def test_transformer_engine_s_layers_have_the_same_weights(
    mock_process: MockProcess, transformer_engine_process: MockProcess, model: str
) -> None:
    """So that rollouts know their names, and checkpoints of layers with and without the library are interchangeable."""
    cell = {
        "engine": "megatron",
        "keys": {"dtype": "bfloat16", "tensor_model_parallel_size": 2, "sequence_parallel": True},
        "model": model,
        "world": 4,
        "rank": 1,
    }
    own = mock_process.call("dryrun_scenarios:layout_of_weights", cell)
    fused = transformer_engine_process.call("dryrun_scenarios:layout_of_weights", cell)
    assert fused == own
