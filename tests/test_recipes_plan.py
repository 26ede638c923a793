"""The recipes for real models, planned from nothing but the models' config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from model_shapes import SHAPES
from typer.testing import CliRunner, Result

from rollcast import compose
from rollcast.cli.app import build_app
from rollcast.contracts.reward import RewardSample, rewards
from rollcast_data.contract import preprocessors
from rollcast_data.files import read_rows, write_parquet

PARAMETERS = {"0.5B": 494_032_768, "7B": 7_615_616_512, "32B": 32_763_876_352}
GIB = 2**30


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model folder of each size, with neither weights nor a tokenizer."""
    root = tmp_path_factory.mktemp("models")
    for name, shape in SHAPES.items():
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(shape))
    return {name: root / name for name in SHAPES}


def plan(recipe: str, folder: Path, *changes: str, gib: int = 80) -> Result:
    needed = [f"model.path={folder}", "data.train_files=[train.parquet]", "placement.device=cuda"]
    options = ["--skip-data", "--json", "--device-memory", str(gib)]
    return CliRunner().invoke(build_app(), ["plan", f"recipe={recipe}", *needed, *changes, *options])


@pytest.mark.parametrize(
    ("recipe", "size", "ranks", "shards", "bytes_each", "tensor"),
    [
        ("gsm8k_qwen2_5_0_5b", "0.5B", (1, 1), 1, (4, 4, 8), 1),
        ("gsm8k_qwen2_5_0_5b_megatron", "0.5B", (2, 1), 2, (2, 4, 12), 1),
        ("gsm8k_qwen2_5_7b_8gpu", "7B", (8, 8), 8, (4, 4, 8), 2),
        ("gsm8k_qwen2_5_32b_64gpu", "32B", (64, 4), None, (2, 4, 12), 4),
        ("gsm8k_qwen2_5_32b_64gpu_fsdp", "32B", (64, 64), 32, (4, 4, 8), 4),
    ],
)
def test_recipes_fit_the_devices_that_they_are_for(
    folders: dict[str, Path],
    recipe: str,
    size: str,
    ranks: tuple[int, int],
    shards: int | None,
    bytes_each: tuple[int, int, int],
    tensor: int,
) -> None:
    result = plan(recipe, folders[size])
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["notes"] == ["the data files were not read"]
    assert found["memory"]["parameters"] == PARAMETERS[size]
    assert found["batch"]["ranks"] == ranks[1]
    assert sum(found["roles"]["global_pool"]["processes_on_nodes"]) == ranks[0]
    assert found["roles"]["global_pool"]["roles"] == ["actor", "rollout", "reference"]
    memory = found["memory"]["pools"]["global_pool"]
    items = memory["items"]
    if shards is None:
        # Two stages share the layers, and each has the embedding or the head; eight ranks share each stage.
        outside = SHAPES[size]["vocab_size"] * SHAPES[size]["hidden_size"]
        own = ((PARAMETERS[size] - 2 * outside) / 2 + outside) / 8
        spread = ranks[1]
    else:
        own, spread = PARAMETERS[size] / shards, 1
    names = ("actor: parameters", "actor: gradients", "actor: optimizer state")
    expected = [own * bytes_each[0], own * bytes_each[1], own * bytes_each[2] / spread]
    assert [items[name] for name in names] == pytest.approx(expected, rel=1e-5)
    assert items["rollout: weights"] == PARAMETERS[size] * 2 // tensor
    assert memory["fits"] is True
    assert max(memory["device"].values()) < 0.9 * 80 * GIB


TASKS = {"dapo_math": "rollout", "code_sandbox": "rollout", "dapo_math_python": "agent_rollout"}
#: Size → option of ``model_size``, nodes, ranks that share a row, devices of a replica.
LAYOUTS = {"0.5B": ("qwen_0_5b", 1, 1, 1), "7B": ("qwen_7b", 1, 1, 2), "32B": ("qwen_32b", 4, 4, 8)}


@pytest.mark.cases(4)
@pytest.mark.parametrize("size", LAYOUTS)
@pytest.mark.parametrize("recipe", TASKS)
def test_tasks_fit_the_cluster_of_each_model_size(folders: dict[str, Path], recipe: str, size: str) -> None:
    option, nodes, parts, tensor = LAYOUTS[size]
    needed = [f"model.path={folders[size]}", "placement.device=cuda", f"model_size={option}"]
    options = ["--skip-data", "--json", "--device-memory", "80"]
    result = CliRunner().invoke(build_app(), ["plan", f"recipe={recipe}", *needed, *options])
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["roles"]["global_pool"]["processes_on_nodes"] == [8] * nodes
    assert found["batch"]["ranks"] == 8 * nodes // parts
    assert TASKS[recipe] in found["stages"]
    assert ("filter_groups" in found["stages"]) == recipe.startswith("dapo")
    memory = found["memory"]["pools"]["global_pool"]
    # fp32 master weights in FSDP shards, bf16 weights in each replica.
    assert memory["items"]["actor: parameters"] == pytest.approx(4 * PARAMETERS[size] / (8 * nodes), rel=1e-5)
    assert memory["items"]["rollout: weights"] == PARAMETERS[size] * 2 // tensor
    assert memory["fits"] is True
    assert max(memory["device"].values()) < 0.9 * 80 * GIB
    # The default of the device, or the recipe where a row is split.
    config = compose([f"recipe={recipe}", *needed]).config
    assert config.actor.engine.use_remove_padding is True
    assert config.data.preprocess in preprocessors


def test_the_data_of_the_tasks_are_scored_by_their_rewards(tmp_path: Path) -> None:
    """Files as they are published, preprocessed and scored as the recipes say."""

    def row(prompt: str, truth: str, ability: str) -> dict[str, Any]:
        return {
            "data_source": "made_up",
            "prompt": [{"role": "user", "content": prompt}],
            "ability": ability,
            "reward_model": {"ground_truth": truth, "style": "rule"},
            "extra_info": {"index": prompt},
        }

    tests = json.dumps({"inputs": ["2 3\n"], "outputs": ["5\n"]})
    for file in ("dapo-math-17k", "aime-2024"):
        write_parquet(tmp_path / f"{file}.parquet", [row("1 + 33?", "34", "MATH")] * 3)
    for file in ("train-00000-of-00001", "validation-00000-of-00001"):
        write_parquet(tmp_path / f"{file}.parquet", [row("Add.", tests, "code"), row("2?", "2", "math")])
    right = {
        "dapo_math": "So it is\nAnswer: 34",
        "dapo_math_python": "So it is\nAnswer: 34",
        "code_sandbox": "```python\nprint(sum(map(int, input().split())))\n```",
    }
    for recipe, response in right.items():
        config = compose([f"recipe={recipe}", f"run_dir={tmp_path / recipe}", f"model.path={tmp_path}"]).config
        output = Path(config.data.preprocess_dir)
        report = preprocessors.get(config.data.preprocess)().run(tmp_path, output)
        assert report.rows == {"train.parquet": 1, "test.parquet": 1}
        assert config.data.train_files == [str(output / "train.parquet")]
        (task,) = read_rows(output / "train.parquet")
        if recipe == "dapo_math_python" or config.reward.name == "math":
            pytest.importorskip("math_verify")
        reward = rewards.get(config.reward.name)(**config.reward.reward_kwargs)
        scores = [reward.score(RewardSample("", text, task.get("ground_truth"))) for text in (response, "no idea")]
        assert [float(getattr(score, "score", score)) for score in scores] == [1.0, 0.0]


def test_a_run_that_does_not_fit_says_which_phase_and_what_would_help(folders: dict[str, Path]) -> None:
    result = plan("gsm8k_qwen2_5_7b_8gpu", folders["7B"], "placement.n_gpus_per_node=2", gib=80)
    found = json.loads(result.stdout)
    assert found["memory"]["pools"]["global_pool"]["fits"] is False
    (note,) = [note for note in found["notes"] if "does not fit" in note]
    assert "GiB generating does not fit into 95% of 80 GiB; more devices" in note


@pytest.mark.parametrize(
    ("recipe", "size", "changes", "says"),
    [
        (
            "gsm8k_qwen2_5_0_5b_megatron",
            "0.5B",
            ["actor.engine.tensor_model_parallel_size=4", "placement.n_gpus_per_node=4"],
            "actor.engine.tensor_model_parallel_size is 4, but the model in",
        ),
        ("gsm8k_qwen2_5_32b_64gpu", "32B", ["actor.engine.pipeline_model_parallel_size=3"], "=3 need a multiple of "),
        ("gsm8k_qwen2_5_32b_64gpu_fsdp", "32B", ["actor.engine.fsdp_size=48"], "fsdp_size is 48"),
        ("gsm8k_qwen2_5_7b_8gpu", "7B", ["rollout.tensor_model_parallel_size=8"], "28 attention heads"),
        ("gsm8k_qwen2_5_32b_64gpu", "32B", ["rollout.gpu_memory_utilization=0.1"], "a replica's weights take 15.3 GiB"),
        ("gsm8k_qwen2_5_32b_64gpu", "32B", ["rollout.pipeline_model_parallel_size=3"], "which does not divide the 64"),
        (
            "gsm8k_qwen2_5_32b_64gpu",
            "32B",
            ["rollout=sglang", "rollout.pipeline_model_parallel_size=2"],
            "rollout 'sglang' has no pipeline parallelism (rollout.pipeline_model_parallel_size)",
        ),
        (
            "gsm8k_qwen2_5_32b_64gpu",
            "32B",
            ["+rollout.engine_kwargs.pipeline_parallel_size=2"],
            "rollout.engine_kwargs.pipeline_parallel_size: set rollout.pipeline_model_parallel_size instead",
        ),
    ],
)
def test_splits_that_cannot_be_are_refused(
    folders: dict[str, Path], recipe: str, size: str, changes: list[str], says: str
) -> None:
    result = plan(recipe, folders[size], *changes)
    assert (result.exit_code, result.stdout) == (2, "")
    assert says in result.stderr.replace("\n", " ")


def test_replicas_that_span_nodes(folders: dict[str, Path]) -> None:
    """Two stages of eight devices halve the weights on each device, and take two nodes."""
    sizes = ["rollout.tensor_model_parallel_size=8"]
    found = []
    for stages in (1, 2):
        changes = [*sizes, f"rollout.pipeline_model_parallel_size={stages}"]
        found.append(json.loads(plan("gsm8k_qwen2_5_32b_64gpu", folders["32B"], *changes, gib=80).stdout))
    one, two = [each["roles"]["replicas"] for each in found]
    assert (one["count"], one["devices"], one["nodes"]) == (8, 8, 1)
    assert (two["count"], two["devices"], two["nodes"]) == (4, 16, 2)
    assert two["sizes"] == {"tensor_model_parallel_size": 8, "pipeline_model_parallel_size": 2}
    weights = [each["memory"]["pools"]["global_pool"]["items"]["rollout: weights"] for each in found]
    # The first stage has the embedding, and the last the head, which is as large.
    assert weights[1] == pytest.approx(weights[0] / 2, rel=1e-3)
