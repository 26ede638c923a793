"""The recipe ``gsm8k_grpo``: a model folder and the preprocessed data set, as with a real model."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
from trainer_tools import launch, read_jsonl, read_metrics

from rollcast.config import compose
from rollcast.errors import ConfigError
from rollcast_data.contract import preprocessors
from rollcast_testing.tiny import CHAT_TEMPLATE, tiny_model_folder
from rollcast_trainer.run.settings import check_run

MADE_UP = [
    {
        "question": f"Ann has {n} hens. Each lays {n + 1} eggs a day. How many eggs are there after two days?",
        "answer": f"A day brings {n}*{n + 1}=<<{n}*{n + 1}={n * (n + 1)}>>{n * (n + 1)} eggs.\n#### {2 * n * (n + 1):,}",
    }
    for n in range(3, 40)
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, int]]:
    """The preprocessed files and their rows: the real ones where they are at hand, else made-up ones."""
    repository = Path(__file__).resolve().parents[3]
    beside = repository.parent / "shared" / "data" / "gsm8k"
    source = Path(os.environ.get("ROLLCAST_GSM8K_DIR", beside))
    if not (source / "train.jsonl").is_file():
        source = tmp_path_factory.mktemp("raw")
        for split in ("train", "test"):
            (source / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in MADE_UP))
    output = tmp_path_factory.mktemp("gsm8k")
    return output, dict(preprocessors.get("gsm8k")().run(source, output).rows)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp("model") / "tiny", hidden=32, chat_template=CHAT_TEMPLATE)


def recipe(model: Path, data: Path, run_dir: Path, *changes: str) -> list[str]:
    return [
        "recipe=gsm8k_grpo",
        f"model.path={model}",
        f"data.train_files=[{data / 'train.parquet'}]",
        f"data.val_files=[{data / 'test.parquet'}]",
        f"run_dir={run_dir}",
        *changes,
    ]


def test_the_recipe_is_for_a_real_model(tmp_path: Path, model: Path) -> None:
    config = compose(recipe(model, tmp_path, tmp_path / "run")).config
    assert (config.data.train_batch_size, config.rollout.n, config.actor.ppo_mini_batch_size) == (1024, 5, 256)
    assert (config.data.max_prompt_length, config.data.max_response_length) == (512, 1024)
    assert (config.actor.optim.lr, config.algorithm.adv_estimator, config.reward.name) == (1e-6, "grpo", "gsm8k")
    assert (config.actor.use_kl_loss, config.actor.kl_loss_coef, config.actor.kl_loss_type) == (True, 0.001, "k3")
    # Nothing is started, but all sizes and parts are checked.
    assert "4 mini-batches of 1280 rows" in check_run(config).algebra.describe()


def test_two_steps_on_a_tiny_model(tmp_path: Path, model: Path, data: tuple[Path, dict[str, int]]) -> None:
    """A random model solves nothing; a little entropy bonus gives it a gradient all the same."""
    sizes = [
        "data.train_batch_size=2",
        "data.max_prompt_length=300",
        "data.max_response_length=8",
        "data.val_max_samples=3",
        "rollout.n=2",
        "actor.ppo_mini_batch_size=2",
        "actor.entropy_coeff=0.01",
        "trainer.total_steps=2",
        "trainer.test_freq=2",
    ]
    run_dir = tmp_path / "run"
    launch(recipe(model, data[0], run_dir, *sizes, "runtime=local", "trackers=[jsonl,report]"))
    rows = read_metrics(run_dir)
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows[1:]:
        assert all(math.isfinite(value) for value in row.values())
        assert row["actor/grad_norm"] > 0
        assert row.keys() >= {"actor/kl_loss", "actor/entropy_loss", "time/ref_log_prob_s"}
    samples = read_jsonl(run_dir / "samples.jsonl")
    assert [sample["step"] for sample in samples] == [0] * 3 + [2] * 3
    for sample in samples:
        assert sample["prompt"].startswith("[user]\n")
        assert sample["prompt"].endswith('"#### <answer>".\n[assistant]\n')
        assert float(sample["ground_truth"]) == int(sample["ground_truth"])
        assert sample["data_source"] == "openai/gsm8k"
    assert (run_dir / "checkpoints" / "step_2" / "trainer.json").exists()
    state = json.loads((run_dir / "checkpoints" / "step_2" / "trainer.json").read_text())
    assert 0 < state["data"]["rows"] <= data[1]["train.parquet"]
    assert "reward" in (run_dir / "report.html").read_text()


def test_the_recipe_runs_on_another_engine() -> None:
    pytest.importorskip("rollcast_megatron")
    composed = compose(["recipe=gsm8k_grpo", "engine=megatron"], allow_missing=True)
    assert composed.config.actor.engine.name == "megatron"
    assert "param_dtype" not in composed.config.actor.engine
    assert composed.config.actor.optim.lr == 1e-6  # keys of every engine stay
    with pytest.raises(ConfigError, match=r"override 'actor.engine.param_dtype=bf16': there is no key"):
        compose(["recipe=gsm8k_grpo", "engine=megatron", "actor.engine.param_dtype=bf16"], allow_missing=True)
