"""Whole runs in this process: what they write, and that one goes on as if it had never stopped."""

from __future__ import annotations

import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_tools import (
    SmallTask,
    before_stage,
    files_of,
    launch,
    read_checkpoint,
    read_jsonl,
    read_metrics,
    set_up,
    without_times,
    worker_of,
)

from rollcast.contracts.hooks import hookimpl
from rollcast.contracts.trainer import trainers
from rollcast.errors import CheckpointError
from rollcast.protocol import DataProto
from rollcast_trainer.ppo import PpoTrainer

pytestmark = pytest.mark.long

NAMED = {
    "step",
    "time/step_s",
    "time/generate_s",
    "time/reward_s",
    "time/old_log_prob_s",
    "time/advantage_s",
    "time/update_actor_s",
    "time/update_weights_s",
    "perf/total_num_tokens",
    "perf/throughput",
    "perf/tflops/actor",
    "perf/tflops/actor_infer",
    "perf/cpu_memory_used_gb",
    "perf/cpu_memory_used_gb/generate",
    "perf/cpu_memory_used_gb/update_actor",
    "reward/mean",
    "actor/entropy",
    "actor/kl",
    "actor/clip_fraction",
    "actor/grad_norm",
    "actor/lr",
    "rollout/tokens_per_s",
    "rollout/logprob_gap_max",
}


@pytest.fixture(scope="module")
def task(small_task: SmallTask, tmp_path_factory: pytest.TempPathFactory) -> SmallTask:
    """The small task on a model with dropout, which draws from a random state of its own."""
    folder = tmp_path_factory.mktemp("dropout") / "model"
    shutil.copytree(small_task.model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.2}))
    return SmallTask(small_task.folder, folder)


@pytest.fixture(scope="module")
def whole_run(task: SmallTask, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps that nothing disturbs."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    result = launch(task.ppo(run_dir, "trackers=[jsonl,report]", "trainer.export=true"))
    assert (result.step, result.run_dir) == (4, run_dir)
    assert result.metrics["step"] == 4
    return run_dir


def test_a_run_writes_its_directory(whole_run: Path) -> None:
    names = {path.name for path in whole_run.iterdir()}
    assert names >= {"config.yaml", "metrics.jsonl", "samples.jsonl", "report.html", "checkpoints", "export"}
    assert sorted(path.name for path in (whole_run / "checkpoints").iterdir() if path.name != "latest") == [
        "step_2",
        "step_4",
    ]
    samples = read_jsonl(whole_run / "samples.jsonl")
    assert [sample["step"] for sample in samples] == [0] * 5 + [2] * 5 + [4] * 5
    assert {"prompt", "response", "ground_truth", "score", "correct"} <= samples[0].keys()
    assert [name for name in names if name.startswith(".")] == [".lock"]


def test_a_run_writes_the_named_metrics(whole_run: Path) -> None:
    rows = read_metrics(whole_run)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert [row["step"] for row in rows if "val/accuracy" in row] == [0, 2, 4]
    for row in rows[1:]:
        assert row.keys() >= NAMED
        assert all(math.isfinite(value) for value in row.values())
        assert row["rollout/logprob_gap_max"] <= 1e-4
        assert row["rollout/weight_version"] == row["step"]
        phases = sum(value for key, value in row.items() if key.startswith("time/") and key != "time/step_s")
        assert phases - row.get("time/validate_s", 0.0) <= row["time/step_s"]
    assert all(row["actor/grad_norm"] > 0 for row in rows[1:])
    assert len({row["reward/mean"] for row in rows[1:]}) > 1


def test_the_export_is_the_trained_model(whole_run: Path, model_folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trained = AutoModelForCausalLM.from_pretrained(whole_run / "export").state_dict()
    before = AutoModelForCausalLM.from_pretrained(model_folder).state_dict()
    assert trained.keys() == before.keys()
    assert any(not torch.equal(trained[name], before[name]) for name in before)
    assert AutoTokenizer.from_pretrained(whole_run / "export").eos_token == "<eos>"


def assert_same_run(run_dir: Path, other: Path) -> None:
    assert without_times(read_metrics(run_dir)) == without_times(read_metrics(other))
    assert read_jsonl(run_dir / "samples.jsonl") == read_jsonl(other / "samples.jsonl")
    ours, theirs = (folder / "checkpoints" / "step_4" for folder in (run_dir, other))
    assert (ours / "trainer.json").read_bytes() == (theirs / "trainer.json").read_bytes()
    assert weights_in(ours).keys() == weights_in(theirs).keys()
    assert all(torch.equal(tensor, weights_in(theirs)[name]) for name, tensor in weights_in(ours).items())


def weights_in(checkpoint: Path) -> dict[str, torch.Tensor]:
    return read_checkpoint(checkpoint / "actor")


def test_the_same_seed_gives_the_same_run_and_another_seed_another(
    task: SmallTask, whole_run: Path, tmp_path: Path
) -> None:
    torch.manual_seed(12345)
    launch(task.ppo(tmp_path / "again"))
    assert_same_run(tmp_path / "again", whole_run)
    launch(task.ppo(tmp_path / "other", "trainer.seed=1", "trainer.total_steps=1"))
    assert without_times(read_metrics(tmp_path / "other"))[1] != without_times(read_metrics(whole_run))[1]


def test_a_run_that_stopped_goes_on_as_if_nothing_had_happened(
    task: SmallTask, whole_run: Path, tmp_path: Path
) -> None:
    result = launch(task.ppo(tmp_path, "trainer.total_steps=2"))
    assert [row["step"] for row in read_metrics(tmp_path)] == [0, 1, 2]
    assert result.metrics["val/accuracy"] == read_metrics(tmp_path)[2]["val/accuracy"]
    torch.manual_seed(777)
    launch(task.ppo(tmp_path))
    assert_same_run(tmp_path, whole_run)


class Interrupted(PpoTrainer):
    """Is stopped in the middle of a step, after it has sampled."""

    interrupted_step = 0

    def setup(self) -> None:
        super().setup()
        before_stage(self, "advantage", self.interrupt)

    def interrupt(self, batch: DataProto) -> None:
        if self.step + 1 == self.interrupted_step:
            raise KeyboardInterrupt


@contextmanager
def as_trainer_ppo(trainer_class: type[PpoTrainer]) -> Iterator[str]:
    """The name under which the class is a trainer in this process."""
    name = trainer_class.__name__.lower()
    trainers.register(name, trainer_class)
    try:
        yield f"trainer.name={name}"
    finally:
        trainers.unregister(name)


@pytest.mark.parametrize("step", [2, 4])
def test_an_interrupted_step_is_done_again(
    task: SmallTask, whole_run: Path, tmp_path: Path, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Epochs are three batches long: the run goes on within one, and at its end."""
    monkeypatch.setattr(Interrupted, "interrupted_step", step)
    with as_trainer_ppo(Interrupted) as name:
        arguments = task.ppo(tmp_path, name, "trainer.save_freq=1")
        with pytest.raises(KeyboardInterrupt):
            launch(arguments)
        assert "RANK" not in os.environ  # the workers were told to stop
        assert [row["step"] for row in read_metrics(tmp_path)] == list(range(step))
        monkeypatch.setattr(Interrupted, "interrupted_step", 0)
        torch.manual_seed(777)
        launch(arguments)
    assert_same_run(tmp_path, whole_run)


def test_a_killed_process_leaves_a_run_that_goes_on(task: SmallTask, whole_run: Path, tmp_path: Path) -> None:
    """Killed by SIGKILL while the responses of step 3 are scored: 5 + 16 + 16 + 5 samples came before."""
    arguments = task.ppo(tmp_path)
    order = task.folder / "die_after"
    order.write_text("50")
    code = "import sys; from trainer_tools import launch; launch(sys.argv[1:])"
    try:
        finished = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    finally:
        order.unlink()
    assert finished.returncode == -signal.SIGKILL, finished.stdout + finished.stderr
    assert [row["step"] for row in read_metrics(tmp_path)] == [0, 1, 2]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir() if path.name != "latest"] == ["step_2"]
    launch(arguments)
    assert_same_run(tmp_path, whole_run)


def test_the_reference_is_still_the_first_model_after_a_restart(task: SmallTask, tmp_path: Path) -> None:
    changes = ["actor.use_kl_loss=true", "algorithm.use_kl_in_reward=true"]
    launch(task.ppo(tmp_path / "whole", *changes))
    launch(task.ppo(tmp_path / "parts", *changes, "trainer.total_steps=2"))
    launch(task.ppo(tmp_path / "parts", *changes))
    assert_same_run(tmp_path / "parts", tmp_path / "whole")
    rows = read_metrics(tmp_path / "whole")
    assert rows[1]["actor/reward_kl_penalty"] == pytest.approx(0, abs=1e-6)
    assert all(row["actor/kl_loss"] > 1e-3 and "time/ref_log_prob_s" in row for row in rows[2:])


def test_a_resumed_trainer_knows_its_place(task: SmallTask, whole_run: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(whole_run, run_dir)
    shutil.rmtree(run_dir / "checkpoints" / "step_4")
    file = run_dir / "checkpoints" / "step_2" / "trainer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "best_accuracy": 0.987}))
    with set_up(task.ppo(run_dir)) as trainer:
        assert (trainer.step, trainer.total_steps, trainer.best_accuracy) == (2, 4, 0.987)
        position = trainer.run.prompts.state_dict()
        assert (position["epoch"], position["batch"]) == (0, 2)
        assert worker_of(trainer).actor.engine.schedule_step == 2


def test_a_finished_run_is_left_as_it_is(task: SmallTask, whole_run: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(whole_run, run_dir)
    before = files_of(run_dir)
    result = launch(task.ppo(run_dir))
    assert result.step == 4
    after = files_of(run_dir)
    assert {name for name in before if before[name] != after.get(name)} == {"config.yaml"}


class FullDisk(PpoTrainer):
    """Has a disk on which no file can grow beyond 20 kB once step 4 is done."""

    def save_checkpoint(self) -> None:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        try:
            if self.step == 4:
                resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
            super().save_checkpoint()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_while_saving_leaves_the_checkpoint_before_it(
    task: SmallTask, whole_run: Path, tmp_path: Path
) -> None:
    with as_trainer_ppo(FullDisk) as name, pytest.raises(CheckpointError, match=r"step_4 .*complete ones: step_2"):
        launch(task.ppo(tmp_path, name))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir() if path.name != "latest"] == ["step_2"]
    assert files_of(tmp_path / "checkpoints" / "step_2").keys() == files_of(whole_run / "checkpoints" / "step_2").keys()
    config = tmp_path / "config.yaml"
    config.write_text(config.read_text().replace("name: fulldisk", "name: ppo"))
    launch(task.ppo(tmp_path))
    assert_same_run(tmp_path, whole_run)


class Diary:
    """Writes down every event."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []

    @hookimpl
    def on_fit_start(self, trainer: Any) -> None:
        self.events.append(("fit_start", trainer.total_steps))

    @hookimpl
    def on_step_start(self, step: int) -> None:
        self.events.append(("step_start", step))

    @hookimpl
    def on_batch_after_rollout(self, step: int, batch: Any) -> None:
        self.events.append(("rollout", {"responses", "rollout_log_probs", "uid"} <= set(batch.keys())))

    @hookimpl
    def on_batch_after_reward(self, step: int, batch: Any) -> None:
        self.events.append(("reward", "token_level_scores" in batch))

    @hookimpl
    def on_batch_after_advantage(self, step: int, batch: Any) -> None:
        self.events.append(("advantage", {"advantages", "returns", "old_log_probs"} <= set(batch.keys())))

    @hookimpl
    def on_validation_end(self, step: int, samples: Any) -> None:
        self.events.append(("validation", len(samples)))

    @hookimpl
    def on_metrics(self, step: int) -> None:
        self.events.append(("metrics", step))

    @hookimpl
    def on_checkpoint_saved(self, step: int, path: str) -> None:
        self.events.append(("checkpoint", Path(path).name))

    @hookimpl
    def on_step_end(self, step: int, metrics: Any) -> None:
        self.events.append(("step_end", metrics["step"]))

    @hookimpl
    def on_exception(self, error: BaseException) -> None:
        self.events.append(("exception", type(error)))

    @hookimpl
    def on_fit_end(self, error: BaseException | None) -> None:
        self.events.append(("fit_end", error if error is None else type(error)))


class Watched(Interrupted):
    """Has a diary among its listeners."""

    diary = Diary()

    def setup(self) -> None:
        self.run.settings.hooks.register(self.diary)
        super().setup()


def test_events_come_in_order(task: SmallTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Watched, "diary", Diary())
    monkeypatch.setattr(Watched, "interrupted_step", 2)
    with as_trainer_ppo(Watched) as name, pytest.raises(KeyboardInterrupt):
        launch(task.ppo(tmp_path, name, "trainer.save_freq=1", "trainer.test_freq=1"))
    batch = [("rollout", True), ("reward", True), ("advantage", True)]
    step = [("step_start", 1), *batch, ("validation", 5), ("metrics", 1), ("checkpoint", "step_1"), ("step_end", 1)]
    end = [("exception", KeyboardInterrupt), ("fit_end", KeyboardInterrupt)]
    assert Watched.diary.events == [
        ("fit_start", 4),
        ("validation", 5),
        ("metrics", 0),
        *step,
        ("step_start", 2),
        *batch[:2],
        *end,
    ]


def test_no_more_checkpoints_than_asked_for_and_the_last_step_has_one(task: SmallTask, tmp_path: Path) -> None:
    changes = ["trainer.save_freq=2", "trainer.total_steps=3", "trainer.max_ckpt_to_keep=1", "trainer.test_freq=-1"]
    result = launch(task.ppo(tmp_path, *changes, "trainer.val_before_train=false"))
    assert result.metrics == read_metrics(tmp_path)[-1]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir() if path.name != "latest"] == ["step_3"]
    rows = read_metrics(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert not any(key.startswith("val/") for row in rows for key in row)


def test_the_run_is_as_long_as_its_epochs(task: SmallTask, tmp_path: Path) -> None:
    with set_up(task.ppo(tmp_path, "trainer.total_steps=null", "trainer.total_epochs=5")) as trainer:
        assert trainer.total_steps == 15
        assert worker_of(trainer).setup.optim.total_training_steps == 15
        assert trainer.run.settings.actor.optim.total_training_steps == -1


def test_resume_disabled_starts_anew_and_keeps_the_earlier_run(
    task: SmallTask, whole_run: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(whole_run, run_dir)
    launch(task.ppo(run_dir, "trainer.resume_mode=disable", "trainer.total_steps=1", "trainer.test_freq=-1"))
    assert [row["step"] for row in read_metrics(run_dir)] == [0, 1]
    assert files_of(tmp_path / "run.old-1") == files_of(whole_run)
