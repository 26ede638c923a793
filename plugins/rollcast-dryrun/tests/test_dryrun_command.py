"""The command: a recipe, run dry on the ranks that differ, and priced as the plan says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from rollcast.cli.app import build_app
from rollcast_dryrun import command, native
from rollcast_dryrun.report import RankReport, Traffic
from rollcast_testing.tiny import tiny_model_folder

#: Memory of an H100 in GiB.
MEMORY = ("--device-memory", "80")
#: Lengths that the tiny model has positions for.
LENGTHS = ("data.max_prompt_length=128", "data.max_response_length=256")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a configuration and a tokenizer, without weights."""
    return tiny_model_folder(tmp_path_factory.mktemp("model"), hidden=256, layers=4, head_dim=32, weights=False)


@pytest.fixture
def compiler() -> None:
    if native.find_compiler() is None:
        pytest.skip("a dry run needs a C++ compiler")


def run(model: Path, recipe: str, *more: str) -> Result:
    needed = [f"model.path={model}", "data.train_files=[train.parquet]", "runtime=ray", *LENGTHS]
    return CliRunner().invoke(build_app(), ["dryrun", f"recipe={recipe}", *needed, *more])


def plan(model: Path, recipe: str, *more: str) -> dict[str, Any]:
    needed = [f"model.path={model}", "data.train_files=[train.parquet]", "placement.device=cuda", *LENGTHS]
    result = CliRunner().invoke(
        build_app(), ["plan", f"recipe={recipe}", *needed, *more, "--skip-data", "--json", *MEMORY]
    )
    pools: dict[str, Any] = json.loads(result.stdout)["memory"]["pools"]
    return pools


@pytest.mark.parametrize(
    ("recipe", "changes", "phases"),
    [
        ("gsm8k_qwen2_5_7b_8gpu", (), ["actor: log-probs", "reference: log-probs", "actor: update", "sync"]),
        pytest.param(
            "gsm8k_qwen2_5_32b_64gpu",
            ("actor.engine.tensor_model_parallel_size=4", "algorithm.adv_estimator=gae"),
            ["actor: log-probs", "reference: log-probs", "actor: update", "critic: values", "critic: update", "sync"],
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_a_recipe_runs_dry(
    model: Path, compiler: None, recipe: str, changes: tuple[str, ...], phases: list[str]
) -> None:
    result = run(model, recipe, *changes, "--json")
    assert result.exit_code == 0, result.output
    (pool,) = json.loads(result.stdout).values()
    assert pool["fits"] is True
    assert set(pool["phases"]) == {"init", *phases, "generate"}
    for rank in pool["ranks"]:
        assert rank["faults"] == []
        assert set(rank["phases"]) >= set(phases)
        assert rank["seconds"]["compute"] > 0
        if "7b" in recipe:  # megatron-core pads what it exchanges, which a small model notices
            planned = plan(model, recipe, *changes)["global_pool"]
            processes = ("libraries", "libraries and graphs")
            beside = sum(size for name, size in planned["items"].items() if name.endswith(processes))
            held = planned["device"]["held"] - beside
            # What is not executed is what the plan says: the rollout, and all processes.
            generating = pool["phases"]["generate"]
            assert generating["bytes"] - generating["trainer_bytes"] == planned["device"]["generating"] - held
            assert pool["phases"]["init"]["bytes"] - pool["phases"]["init"]["trainer_bytes"] == beside
            assert rank["phases"]["generate"]["allocated"] == pytest.approx(held, rel=0.08)
    nodes = {each["link"] for rank in pool["ranks"] for each in rank["collectives"]}
    assert nodes == ({"node"} if "7b" in recipe else {"node", "network"})


@pytest.mark.exhaustive
def test_a_run_that_does_not_fit_is_told(model: Path, compiler: None) -> None:
    changes = ("cluster.device=l4", "rollout.gpu_memory_utilization=0.9", "cluster.memory_gib=8")
    result = run(model, "gsm8k_qwen2_5_0_5b", *changes, "--explain")
    assert result.exit_code == 1
    assert "does not fit" in result.stdout
    assert "on l4" in result.stdout
    assert "iB from rollcast_fsdp/loading.py" in result.stdout


def test_what_a_dry_run_cannot_do_is_told_in_a_line(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(model, "gsm8k_qwen2_5_7b_8gpu", "placement.device=cpu")
    assert result.exit_code == 2
    assert "a dry run is of CUDA devices; set placement.device=cuda" in result.stderr
    result = run(model, "gsm8k_qwen2_5_7b_8gpu", "--packages", "nowhere")
    assert result.exit_code == 2
    assert "--packages is nowhere, which is no folder; make it with pip install --target nowhere" in result.stderr
    monkeypatch.setattr(command, "_PROCESSES", 1)
    monkeypatch.setattr(native, "find_compiler", lambda: None)
    result = run(model, "gsm8k_qwen2_5_7b_8gpu")
    assert result.exit_code == 2
    assert "finds no compiler; install g++" in result.stderr


@pytest.mark.exhaustive
def test_layers_are_those_of_the_cluster_s_packages(
    model: Path, compiler: None, transformer_engine_folder: Path
) -> None:
    result = run(model, "gsm8k_qwen2_5_0_5b_megatron", "--json", "--packages", str(transformer_engine_folder))
    assert result.exit_code == 0, result.output
    (pool,) = json.loads(result.stdout).values()
    kernels = pool["ranks"][0]["phases"]["actor: update"]["kernels"]
    assert {"rmsnorm_bwd", "fused_attn_bwd", "multi_tensor_adam"} <= set(kernels)


@pytest.mark.exhaustive
def test_an_adapter_s_base_is_sent_once(model: Path, compiler: None) -> None:
    changes = ("model.lora_rank=4",)
    result = run(model, "gsm8k_qwen2_5_7b_8gpu", *changes, "--json")
    assert result.exit_code == 0, result.output
    (pool,) = json.loads(result.stdout).values()
    phases = pool["ranks"][0]["phases"]
    once, each_step = (sum(each["bytes"] for each in phases[name]["collectives"]) for name in ("first sync", "sync"))
    assert 0 < each_step < once / 4


@pytest.mark.exhaustive
def test_a_cluster_of_several_kinds_is_refused(model: Path, compiler: None) -> None:
    groups = "cluster.groups=[{device: h100, nodes: 1}, {device: a100, nodes: 1}]"
    result = run(model, "gsm8k_qwen2_5_7b_8gpu", groups)
    assert result.exit_code == 2
    assert "a dry run is of one; name it in cluster.device" in result.stderr
    result = run(model, "gsm8k_qwen2_5_7b_8gpu", "cluster.device=mi300x")
    assert result.exit_code == 2
    assert "a dry run does not know the device 'mi300x'; known: a10," in result.stderr


def record(run: int, whole: dict[str, Any], shorter: dict[str, Any] | None, micro: int, mini: int) -> RankReport:
    phases = {"update": whole} | ({} if shorter is None else {"update, without the last micro-batch": shorter})
    passes = {"update": {"micro_batches": micro, "mini_batches": mini, "run": run}}
    return RankReport(0, {"faults": [], "phases": phases, "passes": passes})


def counted(calls: int, seconds: float) -> dict[str, Any]:
    collectives = [{"kind": "all_gather", "ranks": 8, "nodes": False, "calls": calls, "bytes": 100 * calls}]
    copies = [{"bytes": 10 * calls}]
    return {"collectives": collectives, "kernel_seconds": seconds, "copies": copies, "host_reads": {}, "host_waits": {}}


def test_a_step_is_the_run_micro_batches_and_further_ones_like_the_last() -> None:
    # 3 calls for the whole, and 2 for each micro-batch: 7 for two of them, 3 + 2 * 10 for ten, in 4 mini-batches.
    report = record(2, counted(7, 7.0), counted(5, 5.0), 10, 4)
    assert report.compute_seconds() == 4 * 23
    assert report.traffic() == [Traffic("all_gather", 8, "node", 4 * 23, 4 * 2300)]
    assert report.host_bytes() == 4 * 230
    single = record(1, counted(5, 5.0), None, 1, 4)
    assert single.compute_seconds() == 4 * 5
    assert single.traffic()[0].calls == 4 * 5


def test_what_only_the_first_run_of_a_pass_has_counts_once() -> None:
    # Weights that are gathered once after an update: in the run with one micro-batch, which comes first.
    report = record(2, counted(1, 4.0), counted(2, 3.0), 10, 4)
    assert report.traffic() == [Traffic("all_gather", 8, "node", 4 * 2, 4 * 200)]
    assert report.compute_seconds() == 4 * (4 + 8)


def test_a_collective_s_time_is_that_of_what_a_device_sends() -> None:
    assert Traffic("all_gather", 8, "node", 1, 800).seconds(100.0) == 7.0
    assert Traffic("all_reduce", 8, "node", 1, 800).seconds(100.0) == 14.0
    assert Traffic("send", 2, "node", 1, 800).seconds(100.0) == 8.0
