"""``rollcast map``: a recipe and a cluster to mappings, and a written mapping to a run."""

from __future__ import annotations

import json
import re
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from trainer_tools import SmallTask, launch, read_metrics
from typer.testing import CliRunner

from rollcast.config import compose
from rollcast.contracts.rollout import RolloutMode, rollouts
from rollcast.errors import ConfigError, DataError, PluginNotFoundError, ResourceError
from rollcast_automap.composition import makespan
from rollcast_automap.costs.clusters import ClusterConfig, build_cluster
from rollcast_automap.costs.run_lengths import measure_prompts, read_run_lengths
from rollcast_automap.map_command import app
from rollcast_automap.problem import build_problem
from rollcast_trainer.api import check_run

pytestmark = pytest.mark.long

CPUS = ["cluster.nodes=1", "cluster.device=cpu"]
CRITIC = ["algorithm=gae", "actor.use_kl_loss=true"]


def run(task: SmallTask, tmp_path: Path, *arguments: str) -> str:
    result = CliRunner().invoke(app, [*task.ppo(tmp_path / "run"), *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def rows(task: SmallTask, tmp_path: Path, *arguments: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(run(task, tmp_path, *arguments, "--json"))
    return found


def test_the_best_mapping_comes_first_with_its_parts(small_task: SmallTask, tmp_path: Path) -> None:
    found = rows(small_task, tmp_path, *CRITIC, *CPUS, "cluster.devices_per_node=4", "--count", "5")
    times = [each["step_seconds"] for each in found]
    assert times == sorted(times)
    best = found[0]
    assert set(best["roles"]) == {"actor", "critic", "ref", "rollout"}
    assert sum(sum(counts) for counts in best["pools"].values()) <= 4
    for cost in best["stages"].values():
        parts = sum(cost[part] for part in ("compute", "memory", "communication", "bubble", "tail", "idle"))
        assert cost["seconds"] == pytest.approx(parts)
    for role in best["roles"].values():
        # The engine shards data, and the rollout has no tensor parallelism.
        assert (role["tensor"], role["pipeline"]) == (1, 1)
        assert role["data"] == sum(best["pools"][role["pool"]])
    fewer = rows(small_task, tmp_path, *CRITIC, *CPUS, "cluster.devices_per_node=1")[0]
    assert fewer["step_seconds"] > best["step_seconds"]


def test_a_step_is_priced_with_the_overlaps_of_the_trainer(small_task: SmallTask, tmp_path: Path) -> None:
    """The trainer's own overlaps are held in test_trainer_handles.py."""
    settings = check_run(compose(small_task.ppo(tmp_path, *CRITIC, "trainer.total_steps=1")).config)
    problem = build_problem(settings, build_cluster(ClusterConfig(nodes=1, device="cpu", devices_per_node=4)))
    waits = {stage.name: set(stage.waits_for) for stage in problem.stages}
    assert waits["values"] == waits["ref_log_prob"] == {"rollout"}
    assert waits["update_critic"] == {"rollout", "values"}
    assert waits["update_actor"] == {*waits, "rollout"} - {"update_critic", "update_actor"}
    seconds = {"rollout": 5.0, "old_log_prob": 1.0, "ref_log_prob": 2.0, "values": 1.0, "update_critic": 6.0}
    seconds = {name: seconds.get(name, 4.0) for name in waits}
    apart = {"actor": "a", "rollout": "a", "ref": "a", "critic": "b"}
    actor_passes = sum(seconds[name] for name in waits if name not in ("rollout", "values", "update_critic"))
    assert makespan(problem, apart, seconds) == 5 + max(1 + 6, actor_passes)
    assert makespan(problem, dict.fromkeys(apart, "a"), seconds) == sum(seconds.values())


def test_planners_agree_on_a_small_problem(small_task: SmallTask, tmp_path: Path) -> None:
    cluster = [*CRITIC, *CPUS, "cluster.devices_per_node=2", "--count", "1"]
    oracle, found = (
        rows(small_task, tmp_path, *cluster, "--planner", name)[0] for name in ("exhaustive", "branch_and_bound")
    )
    assert found["step_seconds"] == pytest.approx(oracle["step_seconds"])


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.cases(1)
def test_a_written_mapping_trains(small_task: SmallTask, tmp_path: Path, devices: int) -> None:
    """Pools of one process each, which the runtime of the tests can start."""
    file = tmp_path / "mapping.yaml"
    cluster = [*CRITIC, *CPUS, f"cluster.devices_per_node={devices}"]
    text = run(small_task, tmp_path, *cluster, "--write", str(file))
    assert f"mapping={file} takes it" in text.replace("\n", "")
    best = rows(small_task, tmp_path, *cluster)[0]
    changes = [*CRITIC, "trainer.total_steps=1", "data.val_files=[]", f"mapping={file}"]
    config = compose(small_task.ppo(tmp_path / "run", *changes)).config
    assert len(config.placement.pools) == len(best["pools"]) - 1
    if all(counts == [1] for counts in best["pools"].values()):
        launch(small_task.ppo(tmp_path / "run", *changes))
        assert read_metrics(tmp_path / "run")[-1]["step"] == 1


@pytest.mark.exhaustive
def test_a_mapping_with_rollouts_beside_training_trains(
    small_task: SmallTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rollout's replicas and the actor are processes on the same device."""
    file, rollout = tmp_path / "mapping.yaml", rollouts.get("hf")
    with monkeypatch.context() as patch:
        patch.setattr(rollout, "capabilities", replace(rollout.capabilities, modes=frozenset({RolloutMode.COLOCATED})))
        start = ["rollout.mode=colocated", "rollout.weight_sync=shared_memory"]
        run(small_task, tmp_path, *start, *CPUS, "cluster.devices_per_node=1", "--write", str(file))
    assert "rollout.mode=colocated" in file.read_text()
    launch(small_task.ppo(tmp_path / "run", "trainer.total_steps=1", "data.val_files=[]", f"mapping={file}"))
    assert read_metrics(tmp_path / "run")[-1]["step"] == 1


def test_the_command_line_holds_against_a_mapping(small_task: SmallTask, tmp_path: Path) -> None:
    file = tmp_path / "mapping.yaml"
    file.write_text("overrides:\n  - placement.nnodes=3\n  - rollout.n=2\n")
    composed = compose(small_task.ppo(tmp_path / "run", f"mapping={file}"))
    assert composed.config.placement.nnodes == 3
    assert composed.config.rollout.n == 4  # as the small task's command line says
    assert composed.origins["placement.nnodes"] == f"override 'placement.nnodes=3' of {file}"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"mapping=\S+mapping\.yaml': the file cannot be read: .*No such file"),
        ("placement.nnodes=3", r"is no mapping: it needs a list of texts under 'overrides'"),
        ("overrides: {placement: 1}", r"is no mapping"),
        ("overrides:\n  - placement.nodez=3\n", r"override 'placement\.nodez=3' of \S+mapping\.yaml"),
        (": {", r"the file cannot be read"),
    ],
)
def test_bad_files_are_named(small_task: SmallTask, tmp_path: Path, content: str | None, message: str) -> None:
    file = tmp_path / "mapping.yaml"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        compose(small_task.ppo(tmp_path / "run", f"mapping={file}"))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["cluster.device=tpu"], ConfigError, r"cluster\.device is 'tpu'; valid: .*a100, .*h100, .*cpu;"),
        (["cluster.nodez=2"], ConfigError, r"cluster\.nodez"),
        (["cluster.nodes=0"], ConfigError, r"cluster\.nodes must be at least 1"),
        (
            ["constraints.pinned.judge=1"],
            ConfigError,
            r"constraints\.pinned\.judge names the role 'judge'; the run has .*actor",
        ),
        (["constraints.pinned.actor=9"], ConfigError, r"constraints\.pinned\.actor is 9; the cluster has 8 devices"),
        (["constraints.apart=[[actor]]"], ConfigError, r"constraints\.apart has \['actor'\]; write pairs"),
        (["constraints.headroom=1"], ConfigError, r"constraints\.headroom"),
        (["--planner", "bound"], PluginNotFoundError, r"'bound'[\s\S]*branch_and_bound"),
        (["--cost-model", "none"], PluginNotFoundError, r"'none'[\s\S]*analytical"),
    ],
)
def test_what_cannot_be_mapped_is_named(
    small_task: SmallTask, tmp_path: Path, arguments: list[str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        run(small_task, tmp_path, *arguments)


def test_two_mappings_are_compared(small_task: SmallTask, tmp_path: Path) -> None:
    text = run(small_task, tmp_path, *CPUS, "cluster.devices_per_node=2", "--explain")
    assert "update_actor:" in text
    assert " s (compute " in text
    assert " against " in text


def test_the_best_mapping_is_simulated(small_task: SmallTask, tmp_path: Path) -> None:
    file = tmp_path / "chart.html"
    cluster = [*CRITIC, *CPUS, "cluster.devices_per_node=2", "--count", "2", "--staleness", "1"]
    text = run(small_task, tmp_path, *cluster, "--explain", "--simulate", str(file), "--simulate-steps", "3")
    for number in (1, 2):
        assert f"mapping {number}, simulated: " in text
    assert re.search(r"s a step, the mean of 3; \S+ s predicted \([+-]\d", text.replace("\n", " "))
    assert re.search(r"pool_0: busy \d+%, \d+% predicted", text)
    assert file.read_text().count("<svg") == 2
    best, second = rows(small_task, tmp_path, *cluster, "--simulate", str(file))
    found = best["simulation"]
    assert len(found["step_times"]) == 5
    assert found["step_seconds"] == pytest.approx(best["step_seconds"], rel=0.3)
    assert set(found["pools"]) == set(best["pools"])
    assert "simulation" not in second
    assert file.read_text().count("<svg") == 1
    with pytest.raises(ConfigError, match=r"--simulate \S+none/chart\.html: the file cannot be written"):
        run(small_task, tmp_path, *cluster, "--simulate", str(tmp_path / "none" / "chart.html"))


@pytest.mark.parametrize("modes", [{"hybrid"}, {"colocated"}, {"colocated", "standalone"}])
def test_a_mapping_uses_only_the_modes_of_the_rollout(
    small_task: SmallTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, modes: set[str]
) -> None:
    rollout = rollouts.get("hf")
    limited = replace(rollout.capabilities, modes=frozenset(RolloutMode(mode) for mode in modes))
    monkeypatch.setattr(rollout, "capabilities", limited)
    start = [f"rollout.mode={min(modes)}", "rollout.weight_sync=shared_memory"]
    found = rows(small_task, tmp_path, *start, *CPUS, "cluster.devices_per_node=2", "--count", "400")
    assert {each["mode"] for each in found} == modes


def test_the_memory_of_a_role_follows_its_engine(small_task: SmallTask, tmp_path: Path) -> None:
    def actor_bytes(*overrides: str) -> int:
        pinned = [*CPUS, "cluster.devices_per_node=1", *overrides]
        return int(rows(small_task, tmp_path, *pinned)[0]["roles"]["actor"]["bytes"])

    whole = actor_bytes("actor.engine.model_dtype=fp32")
    assert actor_bytes("actor.engine.model_dtype=bf16") < whole
    assert actor_bytes("actor.engine.model_dtype=fp32", "actor.engine.enable_gradient_checkpointing=true") < whole


def test_a_mapping_obeys_the_constraints(small_task: SmallTask, tmp_path: Path) -> None:
    cluster = [*CRITIC, *CPUS, "cluster.devices_per_node=4", "--count", "3"]
    limits = [
        "constraints.pinned.critic=1",
        "constraints.apart=[[actor,critic]]",
        "constraints.together=[[critic,ref]]",
    ]
    for each in rows(small_task, tmp_path, *cluster, *limits):
        homes = {role: place["pool"] for role, place in each["roles"].items()}
        assert homes["critic"] == homes["ref"] != homes["actor"]
        assert sum(each["pools"][homes["critic"]]) == 1


def test_headroom_stays_free(small_task: SmallTask, tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match=r"headroom 0\.99"):
        run(small_task, tmp_path, *CPUS, "cluster.devices_per_node=1", "constraints.headroom=0.99")


@pytest.mark.parametrize("tied", [True, False])
def test_tied_embeddings_are_seen(small_task: SmallTask, tmp_path: Path, tied: bool) -> None:
    source = next(Path(text.removeprefix("model.path=")) for text in small_task.ppo(tmp_path) if "model.path=" in text)
    content = json.loads((source / "config.json").read_text())
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({**content, "tie_word_embeddings": tied}))
    settings = check_run(compose(small_task.ppo(tmp_path / "run", f"model.path={tmp_path / 'model'}")).config)
    cluster = build_cluster(ClusterConfig(device="cpu", devices_per_node=1))
    assert build_problem(settings, cluster).role("actor").model.tied is tied


def test_lengths_come_from_a_file(small_task: SmallTask, tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    cluster = [*CPUS, "cluster.devices_per_node=1", "--count", "1"]

    def generation(lengths: list[int]) -> dict[str, float]:
        file.write_text("\n".join(map(str, lengths)))
        found: dict[str, float] = rows(small_task, tmp_path, *cluster, "--lengths", str(file))[0]["stages"]["rollout"]
        return found

    equal, tailed = generation([2] * 64), generation([1] * 60 + [5] * 4)
    assert tailed["compute"] < equal["compute"]
    assert tailed["tail"] > equal["tail"]
    with pytest.raises(ConfigError, match=r"--mean-length 3 and --lengths .* choose one"):
        run(small_task, tmp_path, *cluster, "--lengths", str(file), "--mean-length", "3")
    file.write_text("4\nfour\n")
    with pytest.raises(DataError, match=r"line 2: 'four'"):
        run(small_task, tmp_path, *cluster, "--lengths", str(file))


def test_lengths_come_from_an_earlier_run(small_task: SmallTask, tmp_path: Path) -> None:
    launch(small_task.ppo(tmp_path / "earlier", "trainer.total_steps=2", "runtime.record_trajectories=true"))
    found = read_run_lengths(tmp_path / "earlier", (16, 6))
    assert found.prompt is not None
    assert found.response is not None
    steps = [row for row in read_metrics(tmp_path / "earlier") if row["step"]]
    # The mean of the quantiles' curve is close to that of the rows.
    assert found.response.mean == pytest.approx(
        statistics.fmean(row["rollout/response_length_mean"] for row in steps), rel=0.03
    )
    cluster = [*CPUS, "cluster.devices_per_node=1", "--count", "1"]
    whole = rows(small_task, tmp_path, *cluster)[0]
    short = rows(small_task, tmp_path, *cluster, "--lengths", str(tmp_path / "earlier"))[0]
    assert found.prompt.mean < 8  # half of the longest, which is taken without a run
    assert short["stages"]["rollout"]["compute"] != whole["stages"]["rollout"]["compute"]
    with pytest.raises(DataError, match=r"no lengths"):
        run(small_task, tmp_path, *cluster, "--lengths", str(tmp_path))


@pytest.mark.exhaustive
def test_prices_of_a_database_and_nodes_that_differ(small_task: SmallTask, tmp_path: Path) -> None:
    pytest.importorskip("aiconfigurator_core")
    groups = "cluster.groups=[{device: h200}, {device: a100}]"
    cluster = ["--cost-model", "aiconfigurator", "cluster.devices_per_node=1", groups, "--count", "1"]
    best = rows(small_task, tmp_path, *CRITIC, *cluster)[0]
    # The tiny model's heads have no measured kernels.
    assert "no kernels" in best["stages"]["rollout"]["note"]
    composed = compose(small_task.ppo(tmp_path / "run", *CRITIC, *best["overrides"]))
    pools = composed.config.placement.pools
    assert {pool["accelerator_type"] for pool in pools.values()} <= {"H200", "A100"}
    assert set(composed.config.placement.mapping.values()) == set(pools)


def test_prompts_of_the_data_are_measured(small_task: SmallTask, tmp_path: Path) -> None:
    settings = check_run(compose(small_task.ppo(tmp_path / "run")).config)
    found = measure_prompts(settings)
    assert found.maximum == 16
    assert found.quantiles[0][1] == found.quantiles[-1][1] == found.mean  # "4+0=": all are equally long
    cluster = [*CPUS, "cluster.devices_per_node=1", "--count", "1"]
    guessed, measured = (rows(small_task, tmp_path, *cluster, *how)[0] for how in ((), ("--read-data",)))
    assert measured["step_seconds"] < guessed["step_seconds"]


@pytest.mark.exhaustive
def test_every_mapping_that_fits_trains(small_task: SmallTask, tmp_path: Path) -> None:
    """The best mapping of each partition of the roles into pools of one process."""
    cluster = [*CRITIC, *CPUS, "cluster.devices_per_node=2", "--staleness", "1", "--count", "400"]
    found: dict[tuple[tuple[str, ...], int], list[str]] = {}
    for each in rows(small_task, tmp_path, *cluster):
        if all(counts == [1] for counts in each["pools"].values()):
            homes = [place["pool"] for _, place in sorted(each["roles"].items())]
            names = tuple(str(homes.index(home)) for home in homes)
            found.setdefault((names, each["max_staleness"]), each["overrides"])
    assert len(found) == 6  # the rollout alone, or with the actor; critic and reference each here or there
    for number, overrides in enumerate(found.values()):
        run_dir = tmp_path / f"run_{number}"
        launch(small_task.ppo(run_dir, *CRITIC, "trainer.total_steps=1", "data.val_files=[]", *overrides))
        assert read_metrics(run_dir)[-1]["step"] == 1, overrides
