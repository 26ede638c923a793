"""What dry runs execute runs on a device as well, with real numbers, and holds what they say."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

pytest.importorskip("rollcast_fsdp")
pytest.importorskip("transformers")

from rollcast_dryrun.process import MockProcess
from rollcast_testing.cuda import needs_cuda

pytestmark = needs_cuda

#: Sizes with which the model is most of the memory, and not what libraries allocate.
LARGE = {"hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 32000, "num_hidden_layers": 4, "head_dim": 128}
MIB = 1 << 20


def table() -> list[Any]:
    from rollcast_dryrun.devices import cells_of_one_device

    return [pytest.param(cell, id=cell.name) for cell in cells_of_one_device()]


def run(cell: Any) -> dict[str, dict[str, int]]:
    from rollcast_dryrun.devices import run_on_device

    if cell.engine == "megatron":
        pytest.importorskip("rollcast_megatron")
        pytest.importorskip("megatron.core")
        from rollcast_megatron.module import has_transformer_engine

        if has_transformer_engine() != cell.transformer_engine:
            pytest.skip("Megatron's layers are Transformer Engine's if it is installed")
    if cell.model_keys.get("use_liger"):
        pytest.importorskip("liger_kernel")
    return run_on_device(cell)


@pytest.mark.parametrize("cell", table())
def test_a_step(cell: Any) -> None:
    phases = run(cell)
    assert phases["offload"]["allocated"] <= phases["sync"]["allocated"]


@pytest.mark.parametrize(
    ("engine", "keys"),
    [
        ("fsdp", {"param_dtype": "bf16", "use_remove_padding": True}),
        ("fsdp", {"param_dtype": "bf16", "use_remove_padding": True, "enable_gradient_checkpointing": True}),
        ("fsdp", {"param_dtype": "bf16", "use_fused_kernels": True}),
        ("megatron", {"dtype": "bfloat16"}),
    ],
)
def test_memory_is_that_of_the_dry_run(mock_process: MockProcess, engine: str, keys: dict[str, Any]) -> None:
    from rollcast_dryrun.engines import EngineCell

    cell = EngineCell(engine, keys, changes=LARGE, prompt=512, response=512)
    expected = mock_process.call("rollcast_dryrun.engines:record_engine", asdict(replace(cell, device="h200")))[
        "phases"
    ]
    phases = run(cell)
    for name in ("forward_backward", "optimizer_step", "offload"):
        # Products take workspaces of 32 MiB, which the dry run does not know.
        assert phases[name]["peak_allocated"] == pytest.approx(expected[name]["peak_allocated"], rel=0.1, abs=80 * MIB)
