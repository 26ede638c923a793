"""``rollcast.train``: the call that a notebook makes."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from run_commands import SMALL, read_metrics

import rollcast
from rollcast.errors import ConfigError


def test_a_run_and_its_continuation(tmp_path: Path) -> None:
    run = (*SMALL, "runtime=local", f"run_dir={tmp_path}/run", "trackers=[jsonl]")
    first = rollcast.train([*run, "trainer.total_steps=1"])
    assert (first.step, first.run_dir) == (1, tmp_path / "run")
    second = rollcast.train([*run, "trainer.total_steps=2"])
    assert second.step == 2
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert second.metrics["actor/grad_norm"] == rows[-1]["actor/grad_norm"]


def test_a_mistake_is_an_exception_and_starts_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.total_stepz"):
        rollcast.train(["recipe=quickstart", f"run_dir={tmp_path}/run", "trainer.total_stepz=1"])
    with pytest.raises(ConfigError, match="no trainer is chosen"):
        rollcast.train([f"run_dir={tmp_path}/run"])
    assert list(tmp_path.iterdir()) == []


def test_the_callers_logging_is_left_alone(tmp_path: Path) -> None:
    before = list(logging.getLogger().handlers)
    run = (*SMALL, "runtime=local", f"run_dir={tmp_path}/run", "trackers=[]", "trainer.total_steps=1")
    rollcast.train([*run, "data.val_files=[]", "trainer.save_freq=-1"])
    assert logging.getLogger().handlers == before
