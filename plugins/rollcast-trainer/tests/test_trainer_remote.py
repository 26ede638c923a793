"""Runs whose model, data and checkpoints are at a URL."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from trainer_tools import SmallTask, launch, read_checkpoint, read_metrics, without_times

from rollcast.errors import CheckpointError, ConfigError
from rollcast_engine.export_command import export
from rollcast_trainer.run.remote_checkpoints import RemoteCheckpoints

URL = "memory://cluster/run"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROLLCAST_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def whole_run(small_task: SmallTask, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run on local paths."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    launch(small_task.ppo(run_dir))
    return run_dir


def test_a_changed_config_is_the_engines_the_rollouts_and_the_exports(
    small_task: SmallTask, whole_run: Path, tmp_path: Path
) -> None:
    changed = small_task.ppo(tmp_path / "run", "model.override_config={rms_norm_eps: 0.5}", "trainer.export=true")
    launch(changed)
    first, before = read_metrics(tmp_path / "run")[1], read_metrics(whole_run)[1]
    assert first["rollout/logprob_gap_max"] < 1e-4
    assert first["actor/grad_norm"] != pytest.approx(before["actor/grad_norm"], rel=1e-3)
    assert json.loads((tmp_path / "run" / "export" / "config.json").read_text())["rms_norm_eps"] == 0.5


@pytest.fixture
def memory(small_task: SmallTask) -> Iterator[Any]:
    files = MemoryFileSystem()
    files.put(str(small_task.model), "/models/tiny", recursive=True)
    for name in ("train.jsonl", "test.jsonl"):
        files.put(str(small_task.folder / name), f"/data/{name}")
    yield files
    files.rm("/", recursive=True)


def remote(small_task: SmallTask, run_dir: Path, *changes: str) -> list[str]:
    return small_task.ppo(
        run_dir,
        "model.path=memory://models/tiny",
        "data.train_files=[memory://data/tr*.jsonl]",
        "data.val_files=[memory://data/test.jsonl]",
        *changes,
    )


def test_a_remote_run_is_the_run_on_local_paths(
    small_task: SmallTask, memory: Any, whole_run: Path, tmp_path: Path
) -> None:
    launch(remote(small_task, tmp_path / "run"))
    assert without_times(read_metrics(tmp_path / "run")) == without_times(read_metrics(whole_run))
    assert "path: memory://models/tiny" in (tmp_path / "run" / "config.yaml").read_text()


def test_checkpoints_go_to_the_url_and_a_new_machine_goes_on_from_there(
    small_task: SmallTask, memory: Any, whole_run: Path, tmp_path: Path
) -> None:
    to_url = (f"trainer.default_hdfs_dir={URL}", "trainer.max_ckpt_to_keep=1", "trainer.export=true")
    launch(remote(small_task, tmp_path / "run", *to_url, "trainer.total_steps=2"))
    assert [each.rpartition("/")[2] for each in memory.ls("/cluster/run/checkpoints", detail=False)] == [
        "latest",
        "step_2",
    ]
    assert memory.exists("/cluster/run/export/config.json")
    lines = read_metrics(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    launch(remote(small_task, tmp_path / "run", *to_url))
    assert memory.cat_file("/cluster/run/checkpoints/latest") == b"step_4\n"
    assert not memory.exists("/cluster/run/checkpoints/step_2")
    assert without_times([*lines, *read_metrics(tmp_path / "run")]) == without_times(read_metrics(whole_run))
    ours, theirs = (
        read_checkpoint(each / "checkpoints" / "step_4" / "actor") for each in (tmp_path / "run", whole_run)
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_url_with_another_run_is_refused(small_task: SmallTask, memory: Any, tmp_path: Path) -> None:
    to_url = f"trainer.default_hdfs_dir={URL}"
    launch(remote(small_task, tmp_path / "one", to_url, "trainer.total_steps=2"))
    with pytest.raises(ConfigError, match=r"holds a run with other settings \(actor.optim.lr"):
        launch(remote(small_task, tmp_path / "two", to_url, "actor.optim.lr=1e-3"))


def test_a_failed_copy_ends_the_run_with_the_cause_and_loses_nothing(
    small_task: SmallTask,
    memory: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(self: Any, *_: Any, **__: Any) -> None:
        raise OSError("access denied")

    monkeypatch.setattr(MemoryFileSystem, "put_file", refuse)
    with pytest.raises(CheckpointError, match=r"trainer.default_hdfs_dir: .*step_4.*|.*access denied"):
        launch(small_task.ppo(tmp_path / "run", f"trainer.default_hdfs_dir={URL}"))
    assert "a checkpoint is in" in caplog.text
    assert (tmp_path / "run" / "checkpoints" / "step_4").is_dir()
    assert len(read_metrics(tmp_path / "run")) == 5


def test_a_copy_that_was_cut_off_is_not_fetched(memory: Any, tmp_path: Path) -> None:
    """``latest`` names the complete checkpoint, not the newest folder."""
    memory.pipe_file("/cluster/run/config.yaml", b"a: 1")
    memory.pipe_file("/cluster/run/checkpoints/step_2/trainer.json", b"{}")
    memory.pipe_file("/cluster/run/checkpoints/step_4/trainer.json", b"{")
    memory.pipe_file("/cluster/run/checkpoints/latest", b"step_2\n")
    RemoteCheckpoints(URL, tmp_path).fetch()
    assert [each.name for each in (tmp_path / "checkpoints").iterdir()] == ["step_2"]
    memory.pipe_file("/cluster/run/checkpoints/latest", b"../../x\n")
    with pytest.raises(CheckpointError, match=r"names '../../x', not a checkpoint"):
        RemoteCheckpoints(URL, tmp_path / "other").fetch()


def test_a_remote_checkpoint_is_exported_to_a_url(small_task: SmallTask, memory: Any, tmp_path: Path) -> None:
    launch(remote(small_task, tmp_path / "run", f"trainer.default_hdfs_dir={URL}", "trainer.total_steps=2"))
    export(f"{URL}/checkpoints/step_2", "memory://exports/one")
    assert memory.exists("/exports/one/config.json")
    with pytest.raises(CheckpointError, match="memory://exports/one exists and is not an empty folder"):
        export(f"{URL}/checkpoints/step_2", "memory://exports/one")
    with pytest.raises(CheckpointError, match="is not the URL of a checkpoint"):
        export(f"{URL}/step_2", "memory://exports/two")


def test_the_models_of_other_roles_may_be_remote(small_task: SmallTask, memory: Any, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForSequenceClassification

    config = AutoConfig.from_pretrained(small_task.model, num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "scores")
    memory.put(str(tmp_path / "scores"), "/models/scores", recursive=True)
    changes = [
        "algorithm.adv_estimator=gae",
        "critic.model.path=memory://models/tiny",
        "reward_model.enable=true",
        "reward_model.model.path=memory://models/scores",
        "trainer.total_steps=1",
        "trainer.save_freq=-1",
    ]
    launch(remote(small_task, tmp_path / "run", *changes))
    (row,) = read_metrics(tmp_path / "run")[1:]
    assert {"critic/vf_loss", "reward/model_mean"} <= row.keys()


def test_a_data_file_that_is_missing_is_named_with_its_key(small_task: SmallTask, memory: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no file matches data.val_files: memory://data/\*.parquet"):
        launch(remote(small_task, tmp_path / "run", "data.val_files=['memory://data/*.parquet']"))


@pytest.mark.long
@pytest.mark.exhaustive
def test_the_workers_of_a_cluster_copy_the_model_themselves(
    small_task: SmallTask, tmp_path: Path, cache: Path, whole_run: Path, ray_is_up: None
) -> None:
    """The driver's copy is removed before the workers start, as on a node without one."""
    from rollcast_trainer.run.groups import RunGroups

    start = RunGroups.start

    def forget(self: RunGroups, *args: Any) -> Any:
        assert any(cache.rglob("config.json"))
        shutil.rmtree(cache)
        return start(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunGroups, "start", forget)
        launch(
            small_task.ppo(
                tmp_path / "run",
                f"model.path=file://{small_task.model}",
                "runtime=ray",
                "runtime.threads_per_worker=1",
                "trainer.total_steps=1",
                "trainer.save_freq=-1",
            )
        )
    assert any(cache.rglob("config.json"))
    assert len(read_metrics(tmp_path / "run")) == 2
