"""Each tracker with its real library, where that is installed; none of them needs a network here."""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollcast.contracts.hooks import build_hook_manager
from rollcast_report.tracker_set import TrackerSet

CONFIG = {"trainer": {"total_steps": 4}, "data": {"train_files": ["a.jsonl"]}}
SAMPLE = {"prompt": "2+2=", "response": "4", "score": 1.0, "correct": True}


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Libraries write into the user's home; and none of their failures may pass unseen."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home" / "hf"))
    monkeypatch.setenv("CLEARML_CACHE_DIR", str(tmp_path / "home" / "clearml"))
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    (tmp_path / "home").mkdir()


def until(condition: Callable[[], bool]) -> None:
    """Wait for what a library's own process writes a moment after the run has ended."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def track(name: str, run_dir: Path, options: dict[str, Any], first: int, last: int) -> None:
    run_dir.mkdir(exist_ok=True)
    hooks = build_hook_manager()
    chosen = TrackerSet([name], {name: options})
    chosen.start(hooks, run_dir, CONFIG, first - 1)
    for step in range(first, last + 1):
        hooks.hook.on_metrics(
            trainer=None, step=step, metrics={"step": step, "reward/mean": step / 10, "val/mean@4": 0.5}
        )
    hooks.hook.on_validation_end(trainer=None, step=last, metrics={}, samples=[SAMPLE])
    hooks.hook.on_fit_end(trainer=None, error=None)
    chosen.close()


def test_tensorboard(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("tensorboard")
    track("tensorboard", tmp_path / "run", {}, 1, 4)
    track("tensorboard", tmp_path / "run", {}, 3, 5)  # step 2 was the last checkpoint
    assert not caplog.records
    module = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = module.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"step", "reward/mean", "val/mean@4"}
    rewards = events.Scalars("reward/mean")
    assert [event.step for event in rewards] == [1, 2, 3, 4, 5]
    assert [event.value for event in rewards] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    texts = [event.tensor_proto.string_val[0].decode() for event in events.Tensors("val/samples/text_summary")]
    assert '"response": "4"' in texts[-1]
    assert "total_steps" in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()


def test_mlflow(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    options = {"tracking_uri": uri, "project_name": "digits", "tags": {"who": "me"}}
    # Artifacts of a database without a server lie beside it only if the experiment says so.
    mlflow.MlflowClient(uri).create_experiment("digits", artifact_location=(tmp_path / "artifacts").as_uri())
    track("mlflow", tmp_path / "run", options, 1, 2)
    track("mlflow", tmp_path / "run", options, 3, 4)
    client = mlflow.MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    assert (run.info.run_name, run.info.status, run.data.tags["who"]) == ("run", "FINISHED", "me")
    assert run.data.params["trainer.total_steps"] == "4"
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert sorted((entry.step, entry.value) for entry in history) == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]
    assert len(client.get_metric_history(run.info.run_id, "val/mean_at_4")) == 4
    (file,) = (tmp_path / "artifacts").rglob("step_2.jsonl")
    assert json.loads(file.read_text()) == SAMPLE
    assert "rollcast" not in {record.name.split(".")[0] for record in caplog.records}


def test_wandb_offline(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("wandb")
    options = {"mode": "offline", "project_name": "digits"}
    track("wandb", tmp_path / "run", options, 1, 2)
    track("wandb", tmp_path / "run", options, 3, 4)
    run_id = json.loads((tmp_path / "run" / "trackers" / "wandb.json").read_text())["id"]
    files = list((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert {file.stem for file in files} == {f"run-{run_id}"}
    until(lambda: all(b"reward/mean" in file.read_bytes() for file in files))
    assert list((tmp_path / "run" / "wandb").rglob("*.table.json"))
    assert "rollcast" not in {record.name.split(".")[0] for record in caplog.records}


def test_swanlab_offline(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("swanlab")
    track("swanlab", tmp_path / "run", {"mode": "offline"}, 1, 2)
    track("swanlab", tmp_path / "run", {"mode": "offline"}, 3, 4)
    files = list((tmp_path / "run" / "swanlab").rglob("*.swanlab"))
    assert files
    until(lambda: all(b"reward/mean" in file.read_bytes() for file in files))
    assert len({file.name for file in files}) == 1  # the same experiment
    assert "rollcast" not in {record.name.split(".")[0] for record in caplog.records}


def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    track("trackio", tmp_path / "run", {"project_name": "digits"}, 1, 2)
    track("trackio", tmp_path / "run", {"project_name": "digits"}, 3, 4)
    storage = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
    assert storage.get_runs("digits") == ["run"]
    until(lambda: len(storage.get_logs("digits", "run")) >= 4)
    logs = [row for row in storage.get_logs("digits", "run") if "reward/mean" in row]
    assert [(row["step"], row["reward/mean"]) for row in logs] == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]
    assert "rollcast" not in {record.name.split(".")[0] for record in caplog.records}


def test_clearml_offline(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("clearml")
    # Its analysis of the repository takes up to five minutes, and its end waits for that.
    off = ("detect_repository", "pytorch", "tensorboard", "matplotlib", "hydra", "joblib", "scikit", "gradio")
    init = {"auto_connect_frameworks": dict.fromkeys(off, False)}
    track("clearml", tmp_path / "run", {"offline": True, "init_kwargs": init}, 1, 2)
    task_id = json.loads((tmp_path / "run" / "trackers" / "clearml.json").read_text())["id"]
    assert task_id.startswith("offline-")
    metrics = [path for path in tmp_path.rglob("metrics.jsonl") if task_id in str(path)]
    assert metrics
    until(lambda: "reward" in metrics[0].read_text())
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("rollcast")]
    # Its close was seen not to return within five minutes, rarely; what was reported is there all the same.
    late = "clearml did not end within 60 s and is left behind; what it shows is not complete"
    assert messages in ([], [late])
