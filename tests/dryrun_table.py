"""Prints the table of planned and dry-run memory of docs/dry-runs.md; ``python tests/dryrun_table.py [NAME ...]``.

``ROLLCAST_TRANSFORMER_ENGINE`` names a folder with Transformer Engine, of which Megatron's layers are then.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from model_shapes import SHAPES
from typer.testing import CliRunner

from rollcast.cli.app import build_app
from rollcast_automap.costs.device_kinds import DEVICE_KINDS
from rollcast_testing.tiny import build_tokenizer

GIB = 2**30
_SMALL, _SEVEN = "gsm8k_qwen2_5_0_5b", "gsm8k_qwen2_5_7b_8gpu"
_FSDP, _MEGATRON = "gsm8k_qwen2_5_32b_64gpu_fsdp", "gsm8k_qwen2_5_32b_64gpu"
_ONE_NODE = ("placement.nnodes=1", "rollout.tensor_model_parallel_size=2")
_ENGINE = "actor.engine."
#: Size, recipe and further overrides.
ROWS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("0.5B", _SMALL, ()),
    ("0.5B", _SMALL, (f"{_ENGINE}enable_gradient_checkpointing=false",)),
    ("0.5B", _SMALL, (f"{_ENGINE}use_fused_kernels=false",)),
    ("0.5B", _SMALL, ("model.lora_rank=32",)),
    ("0.5B", "gsm8k_qwen2_5_0_5b_megatron", ()),
    ("7B", _SEVEN, ()),
    ("7B", _SEVEN, (f"{_ENGINE}param_offload=true", f"{_ENGINE}optimizer_offload=true")),
    ("7B", _SEVEN, (f"{_ENGINE}use_fused_kernels=false",)),
    ("7B", _SEVEN, (f"{_ENGINE}ulysses_sequence_parallel_size=2",)),
    ("7B", _SEVEN, (f"{_ENGINE}enable_activation_offload=true",)),
    ("7B", _SEVEN, (f"{_ENGINE}reshard_after_forward=false",)),
    ("7B", _SEVEN, ("model.lora_rank=32",)),
    ("7B", _SEVEN, ("algorithm.adv_estimator=gae",)),
    ("7B", _MEGATRON, (*_ONE_NODE, f"{_ENGINE}tensor_model_parallel_size=4")),
    ("7B", _MEGATRON, (*_ONE_NODE, f"{_ENGINE}tensor_model_parallel_size=2", f"{_ENGINE}param_offload=true")),
    ("32B", _FSDP, ()),
    ("32B", _MEGATRON, ()),
    ("32B", _MEGATRON, (f"{_ENGINE}sequence_parallel=false",)),
    ("70B", _FSDP, ()),
    ("70B", _MEGATRON, ()),
)


def write_models(root: Path) -> None:
    """Write a model folder of each size, with a tokenizer and without weights."""
    for name, shape in SHAPES.items():
        build_tokenizer().save_pretrained(root / name)
        (root / name / "config.json").write_text(json.dumps(shape))


def overrides(models: Path, size: str, recipe: str, changes: tuple[str, ...]) -> list[str]:
    """Return the arguments of a row."""
    needed = [f"model.path={models / size}", "data.train_files=[train.parquet]", "placement.device=cuda"]
    return [f"recipe={recipe}", *needed, *changes]


def planned(arguments: list[str]) -> dict[str, int]:
    """Phase → bytes of the models on a device, as planned."""
    options = ["--skip-data", "--json", "--device-memory", "80"]
    result = CliRunner().invoke(build_app(), ["plan", *arguments, *options])
    if result.exit_code:
        raise RuntimeError(result.output)
    (pool,) = json.loads(result.stdout)["memory"]["pools"].values()
    beside = sum(size for name, size in pool["items"].items() if name.endswith(("libraries", "libraries and graphs")))
    return {phase: size - beside for phase, size in pool["device"].items()}


def executed(arguments: list[str], rank: int) -> dict[str, int]:
    """Phase → bytes of all blocks on a rank at their largest, as executed."""
    from rollcast_dryrun.process import MockProcess

    packages = os.environ.get("ROLLCAST_TRANSFORMER_ENGINE")
    with MockProcess([] if packages is None else [Path(packages)]) as process:
        device = asdict(DEVICE_KINDS["h100"])
        record = process.call("rollcast_dryrun.recipe:dry_run_rank", arguments, None, "global_pool", rank, device)
    peaks: dict[str, int] = {"forward": 0, "updating": 0}
    for name, phase in record["phases"].items():
        kind = "updating" if "update" in name else "forward" if ":" in name else name
        peaks[kind] = max(peaks.get(kind, 0), phase["peak_allocated"])
    return peaks


def compare(arguments: list[str], ranks: list[int], plan: Mapping[str, int]) -> Mapping[str, tuple[int, int]]:
    """Phase → planned and executed bytes."""
    runs = [executed(arguments, rank) for rank in ranks]
    return {phase: (plan[phase], max(run[phase] for run in runs)) for phase in ("forward", "updating")}


def table(chosen: list[str]) -> Iterator[str]:
    """Yield the lines of the table, of the rows whose size, recipe or overrides have all of the texts."""
    yield "| model | recipe | changes | planned | executed | difference |"
    yield "|---|---|---|---|---|---|"
    rows = [row for row in ROWS if all(text in f"{row[0]} {row[1]} {' '.join(row[2])}" for text in chosen)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as executor:
        models = Path(folder)
        write_models(models)
        arguments = [overrides(models, *row) for row in rows]
        plans = [planned(each) for each in arguments]  # not beside the runs: it replaces this process's output
        last = [7 if _ONE_NODE[0] in row[2] else 63 for row in rows]
        ranks = [[0, rank] if row[1] == _MEGATRON else [0] for row, rank in zip(rows, last, strict=True)]
        found = [executor.submit(compare, *each) for each in zip(arguments, ranks, plans, strict=True)]
        for (size, recipe, changes), call in zip(rows, found, strict=True):
            phases = call.result()
            plan, run = (max(pair[side] for pair in phases.values()) for side in (0, 1))
            parts = "; ".join(f"{name} {a / GIB:.2f} {b / GIB:.2f}" for name, (a, b) in phases.items())
            sys.stderr.write(f"{size} {recipe} {changes}: {parts}\n")
            named = ", ".join(f"`{text}`" for text in changes)
            yield f"| {size} | {recipe} | {named} | {plan / GIB:.1f} GiB | {run / GIB:.1f} GiB | {plan / run - 1:+.1%} |"


if __name__ == "__main__":
    for line in table(sys.argv[1:]):
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
