"""Checkpoints that are written while training goes on: whole or absent, and of the step that they name."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_tools import SmallTask, launch, read_metrics, set_up, without_times, worker_of

from rollcast.errors import CheckpointError
from rollcast_engine import sharded_checkpoint as checkpoint

ASYNC = ["trainer.async_save=true", "trainer.save_freq=1"]


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Holds writers up before their last file until it is set."""
    release, write = threading.Event(), checkpoint.write_sums

    def wait(path: Path, rank: int, written: Any) -> None:
        assert release.wait(60)
        write(path, rank, written)

    monkeypatch.setattr(checkpoint, "write_sums", wait)
    yield release
    release.set()


@pytest.mark.exhaustive
def test_a_run_in_parts_is_that_of_one_piece(small_task: SmallTask, tmp_path: Path) -> None:
    launch(small_task.ppo(tmp_path / "whole"))
    launch(small_task.ppo(tmp_path / "parts", *ASYNC, "trainer.total_steps=2"))
    assert (tmp_path / "parts" / "checkpoints" / "latest").read_text() == "step_2\n"
    launch(small_task.ppo(tmp_path / "parts", *ASYNC))
    rows, expected = (without_times(read_metrics(tmp_path / name)) for name in ("parts", "whole"))
    assert rows == expected
    names = {path.name for path in (tmp_path / "parts" / "checkpoints").iterdir()}
    assert names == {"latest", "step_1", "step_2", "step_3", "step_4"}


def test_training_goes_on_while_a_checkpoint_is_written(
    small_task: SmallTask, tmp_path: Path, held: threading.Event
) -> None:
    with set_up(small_task.ppo(tmp_path, *ASYNC)) as trainer:
        trainer.train_step()
        saved = weights(trainer)
        assert trainer.run.checkpoints.steps() == []
        settings = trainer.run.settings
        trainer.run.settings = replace(settings, trainer=replace(settings.trainer, save_freq=-1))
        trainer.saver.settle()
        trainer.train_step()
        assert trainer.run.checkpoints.steps() == []
        held.set()
        trainer.saver.settle(wait=True)
        assert trainer.run.checkpoints.steps() == [1]
        later = weights(trainer)
        worker_of(trainer).load_checkpoint(str(trainer.run.checkpoints.path(1)))
        loaded = weights(trainer)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in saved.items())
    assert any(not torch.equal(later[name], tensor) for name, tensor in saved.items())


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    engine = worker_of(trainer).actor.engine
    return {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()}


def test_a_failed_write_is_reported_at_the_next_step(
    small_task: SmallTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = checkpoint.write_sums

    def fail(path: Path, rank: int, written: Any) -> None:
        if "step_2" in str(path):
            raise OSError("no space left on the disk")
        write(path, rank, written)

    monkeypatch.setattr(checkpoint, "write_sums", fail)
    with pytest.raises(CheckpointError, match=r"step_2 could not be written: .*no space left .*complete ones: step_1"):
        launch(small_task.ppo(tmp_path, *ASYNC))
    assert [row["step"] for row in read_metrics(tmp_path)][-1] in (2, 3)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["latest", "step_1"]
    monkeypatch.undo()
    launch(small_task.ppo(tmp_path, *ASYNC))
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step_4\n"


def test_an_error_in_training_does_not_lose_the_checkpoint_under_way(
    small_task: SmallTask, tmp_path: Path, held: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rollcast_trainer.stages.advantage import Advantage

    call = Advantage.__call__

    def fail(self: Advantage, batch: Any) -> Any:
        if self.run.step == 2:
            held.set()
            raise ZeroDivisionError
        return call(self, batch)

    monkeypatch.setattr(Advantage, "__call__", fail)
    with pytest.raises(ZeroDivisionError):
        launch(small_task.ppo(tmp_path, *ASYNC))
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step_1\n"


KILLED = """
import os, signal, sys
from trainer_tools import launch
from rollcast_engine import sharded_checkpoint as checkpoint

write = checkpoint.write_sums

def die(path, rank, written):
    if "step_2" in str(path):
        os.kill(os.getpid(), signal.SIGKILL)
    write(path, rank, written)

checkpoint.write_sums = die
launch(sys.argv[1:])
"""


def test_a_process_killed_while_writing_loses_nothing_saved(small_task: SmallTask, tmp_path: Path) -> None:
    arguments = small_task.ppo(tmp_path, *ASYNC)
    finished = subprocess.run(
        [sys.executable, "-c", KILLED, *arguments],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert finished.returncode == -signal.SIGKILL, finished.stdout + finished.stderr
    folder = tmp_path / "checkpoints"
    assert (folder / "latest").read_text() == "step_1\n"
    assert {path.name for path in folder.iterdir()} == {"latest", "step_1", ".unfinished-step_2"}
    launch(arguments)
    assert {path.name for path in folder.iterdir()} == {"latest", "step_1", "step_2", "step_3", "step_4"}
    steps = [row["step"] for row in read_metrics(tmp_path)]
    assert sorted(set(steps)) == [0, 1, 2, 3, 4]
