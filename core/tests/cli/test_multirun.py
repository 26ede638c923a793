"""``rollcast train --multirun``: a run for each combination of values."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollcast.config.overrides import expand_sweeps, format_override
from rollcast.errors import ConfigError

Run = Callable[..., Any]
#: Values that a path or a shell could take for something else.
VALUES = st.lists(st.text("ab01./ :=,%-'\"", min_size=1, max_size=400), min_size=2, max_size=4, unique=True)


@pytest.fixture
def train(run_apart: Run, cli_plugin: Path) -> Run:
    """Run ``rollcast train -m`` on the test's trainer."""

    def call(*overrides: str) -> Any:
        return run_apart("train", "-m", "trainer=tp_cli", "runtime=local", *overrides)

    return call


@pytest.fixture
def steps(tmp_path: Path) -> Callable[[], dict[str, int]]:
    """Return a function that counts the steps of each run that left checkpoints."""

    def count() -> dict[str, int]:
        folders = tmp_path.glob("runs/**/checkpoints")
        return {str(each.parent.relative_to(tmp_path / "runs")): len(list(each.iterdir())) for each in folders}

    return count


def test_each_combination_is_a_run_in_its_own_folder(train: Run, steps: Callable[[], dict[str, int]]) -> None:
    done = train("+trainer.steps=1,2", "run_dir=runs/x,runs/y")
    assert done.code == 0, done.err
    assert steps() == {f"{where}/trainer.steps={n}": n for where in ("x", "y") for n in (1, 2)}
    told = [line for line in done.err.splitlines() if line.startswith("run ")]
    assert told[:2] == [f"run {n} of 4: +trainer.steps=1 run_dir=runs/{where}" for n, where in ((1, "x"), (2, "y"))]
    assert len(told) == 4


def test_without_a_sweep_there_is_one_run(train: Run, steps: Callable[[], dict[str, int]]) -> None:
    done = train("trainer.steps=3", "run_dir=runs/x")
    assert done.code == 0, done.err
    assert steps() == {"x": 3}


def test_nothing_starts_if_one_combination_is_wrong(train: Run, tmp_path: Path) -> None:
    done = train("trainer.steps=1,many", "run_dir=runs/x")
    assert done.code == 2
    assert "error: trainer.steps=many: override 'trainer.steps=many': trainer.steps must be an integer" in done.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.exhaustive
def test_a_failed_run_does_not_stop_the_others(train: Run, steps: Callable[[], dict[str, int]]) -> None:
    done = train("trainer.what=refuse,bug,fine", "trainer.steps=1", "run_dir=runs/x")
    assert done.code == 2
    assert "2 of 3 runs failed: trainer.what=refuse (exit code 2); trainer.what=bug (exit code 1)" in done.err
    assert steps() == {f"x/trainer.what={what}": 1 for what in ("refuse", "bug", "fine")}


@pytest.fixture
def waiting(cli_plugin: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A sweep whose first run waits for a signal."""
    overrides = ["trainer=tp_cli", "runtime=local", "trainer.what=wait,fine", "trainer.steps=1", "run_dir=runs/x"]
    with subprocess.Popen(
        [sys.executable, "-m", "rollcast", "train", "-m", *overrides],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background job ignores SIGINT, and its children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        end = time.monotonic() + 60
        while not (tmp_path / "runs/x/trainer.what=wait/waits").exists():
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < end
            time.sleep(0.05)
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.cases(1)
def test_a_signal_stops_the_run_and_the_sweep(
    waiting: subprocess.Popen[str], number: signal.Signals, tmp_path: Path
) -> None:
    waiting.send_signal(number)
    _, err = waiting.communicate(timeout=60)
    assert waiting.returncode == 128 + number
    assert "interrupted; the last checkpoint is" in err  # the run's own message
    assert "interrupted in run 1 of 2; the same command continues it" in err
    assert not (tmp_path / "runs/x/trainer.what=fine").exists()


# -- combinations -----------------------------------------------------------------------------------


def test_the_last_sweep_varies_fastest() -> None:
    found = [each.overrides for each in expand_sweeps(["a=1,2", "b=range(1,3)", "c=x"])]
    assert found == [("a=1", "b=1", "c=x"), ("a=1", "b=2", "c=x"), ("a=2", "b=1", "c=x"), ("a=2", "b=2", "c=x")]


@pytest.mark.parametrize("text", ["trainer.seed=interval(0,1)", "recipe=glob(*)"])
def test_values_that_are_not_listed_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="does not list its values"):
        expand_sweeps([text])


@given(VALUES)
def test_folders_are_distinct_names_whatever_the_values_are(values: list[str]) -> None:
    texts = [format_override("model.path", value) for value in values]
    sweep = "model.path=" + ",".join(text.partition("=")[2] for text in texts)
    found = expand_sweeps([sweep])
    assert [each.overrides for each in found] == [(text,) for text in texts]
    folders = [each.folder for each in found]
    assert len(set(folders)) == len(values)
    for folder in folders:
        assert Path(folder).name == folder
        assert len(folder.encode()) <= 255
