"""The bytes that `rollcast map` prices for collectives are those that a dry run executes."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from rollcast import compose
from rollcast_automap.contract import Cluster, Lengths, Mesh, Placement, Pool
from rollcast_automap.costs.analytical import AnalyticalConfig, AnalyticalCosts
from rollcast_automap.costs.clusters import ClusterConfig, build_cluster
from rollcast_automap.costs.device_kinds import DEVICE_KINDS
from rollcast_automap.problem import build_problem
from rollcast_dryrun.process import MockProcess
from rollcast_dryrun.report import RankReport
from rollcast_testing.tiny import tiny_model_folder
from rollcast_trainer.api import check_run

#: Stage → the phase of a dry run.
PHASES = {
    "old_log_prob": "actor: log-probs",
    "ref_log_prob": "reference: log-probs",
    "update_actor": "actor: update",
}
MEGATRON = ("placement.nnodes=1", "rollout.tensor_model_parallel_size=2", "actor.engine.tensor_model_parallel_size=2")


def without_computation(cluster: Cluster) -> Cluster:
    """Return a cluster whose devices compute in no time, so that nothing hides a collective."""
    kind = cluster.nodes[0].kind
    fast = replace(kind, flops=dict.fromkeys(kind.flops, 1e30), memory_bandwidth=1e30)
    return replace(cluster, nodes=tuple(replace(node, kind=fast) for node in cluster.nodes))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("recipe", "changes", "mesh"),
    [
        ("gsm8k_qwen2_5_7b_8gpu", (), Mesh(data=8)),
        (
            "gsm8k_qwen2_5_32b_64gpu",
            (*MEGATRON, "actor.engine.pipeline_model_parallel_size=1"),
            Mesh(data=4, tensor=2),
        ),
        ("gsm8k_qwen2_5_32b_64gpu", MEGATRON, Mesh(data=2, tensor=2, pipeline=2)),
    ],
)
def test_the_cost_model_prices_what_is_executed(
    mock_process: MockProcess, tmp_path: Path, recipe: str, changes: tuple[str, ...], mesh: Mesh
) -> None:
    pytest.importorskip("rollcast_megatron" if mesh.tensor > 1 else "rollcast_fsdp")
    folder = tiny_model_folder(tmp_path / "model", hidden=256, layers=4, head_dim=32, tied=False, weights=False)
    lengths = ("data.max_prompt_length=128", "data.max_response_length=256")
    needed = (f"model.path={folder}", "data.train_files=[train.parquet]", "runtime=ray", "placement.device=cuda")
    arguments = [f"recipe={recipe}", *needed, *lengths, *changes]
    composed = compose(arguments, None, needs_trainer=True)
    composed.load_plugins()
    settings = check_run(composed.config)
    cluster = without_computation(build_cluster(ClusterConfig(device="h100", nodes=1)))
    problem = build_problem(settings, cluster, Lengths(256, 256), prompt=Lengths(128, 128))
    costs = AnalyticalCosts(AnalyticalConfig(link=1.0, latency_s=0.0, launch_s=0.0))
    device = asdict(DEVICE_KINDS["h100"])
    record = mock_process.call("rollcast_dryrun.recipe:dry_run_rank", arguments, None, "global_pool", 0, device)
    report, priced = RankReport(0, record), 0
    for stage in problem.stages:
        if stage.name not in PHASES:
            continue
        phase = PHASES[stage.name]
        rows = problem.rows / mesh.data / (problem.mini_batches if stage.kind == "update" else 1)
        placement = Placement(stage.role, "pool", mesh, round(rows / record["passes"][phase]["micro_batches"]))
        cost = costs.stage_cost(problem, stage, placement, Pool("pool", ((0, 8),)), "hybrid")
        executed = sum(one.seconds(cluster.nodes[0].link_bandwidth) for one in report.traffic_of(phase))
        assert cost.communication == pytest.approx(executed, rel=0.08), json.dumps(describe(report, phase))
        priced += 1
    assert priced == len(PHASES)


def describe(report: RankReport, phase: str) -> list[Any]:
    return [vars(one) for one in report.traffic_of(phase)]
