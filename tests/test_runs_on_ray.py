"""Whole runs by the command line on an embedded Ray: what they write, and how they stop and go on."""

from __future__ import annotations

import json
import math
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from run_commands import SMALL, Commands, read_metrics, without_times

pytestmark = pytest.mark.long

NAMED_METRICS = {
    "step",
    "time/step_s",
    "time/generate_s",
    "time/update_actor_s",
    "reward/mean",
    "actor/entropy",
    "actor/kl",
    "actor/clip_fraction",
    "actor/grad_norm",
    "rollout/tokens_per_s",
    "rollout/logprob_gap_max",
}


@pytest.fixture(scope="module")
def whole_run(rollcast_of_module: Commands) -> Path:
    """Six steps that nothing disturbs."""
    rollcast_of_module.must_run("train", *SMALL, "run_dir=whole", "trainer.total_steps=6")
    return rollcast_of_module.folder / "whole"


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None:
            out, err = process.communicate()
            pytest.fail(f"the run ended by itself, with code {process.returncode}:\n{out}\n{err}")
        if time.monotonic() > deadline:
            process.kill()
            pytest.fail(f"waited {seconds:g} s in vain")
        time.sleep(0.01)


def assert_gone(processes: list[psutil.Process], seconds: float = 30.0) -> None:
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    assert not alive, f"left running: {[process.name() for process in alive]}"


def test_run_directory(whole_run: Path) -> None:
    rows = read_metrics(whole_run)
    assert [row["step"] for row in rows] == list(range(7))
    for row in rows[1:]:
        assert row.keys() >= NAMED_METRICS
        assert all(math.isfinite(value) for value in row.values())
        assert row["rollout/logprob_gap_max"] <= 1e-4
    assert [row["step"] for row in rows if "val/accuracy" in row] == [0, 2, 4, 6]
    samples = [json.loads(line) for line in (whole_run / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 4 * 16
    assert {"step", "prompt", "response", "ground_truth", "score"} <= samples[0].keys()
    checkpoints = whole_run / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["latest", "step_2", "step_4", "step_6"]
    assert (checkpoints / "latest").read_text() == "step_6\n"
    assert "train_batch_size: 8" in (whole_run / "config.yaml").read_text()


def test_report_reads_offline(whole_run: Path) -> None:
    page = (whole_run / "report.html").read_text()
    assert not re.search(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//""", page)
    assert "reward/mean" in page
    assert "val/accuracy" in page


def test_export_loads_with_transformers(whole_run: Path, rollcast_of_module: Commands) -> None:
    from transformers import AutoModelForCausalLM

    from rollcast_data.tokenizer import load_tokenizer

    rollcast_of_module.must_run("export", "whole/checkpoints/step_6", "exported")
    folder = rollcast_of_module.folder / "exported"
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.num_parameters() > 100_000
    assert load_tokenizer(str(folder))("31=")["input_ids"]


def _is_worker(title: str) -> bool:
    """Ray's title of a process that runs a method is the task's name, ``role.method``, and else the actor's."""
    return title.startswith(("ray::HostActor", "ray::actor_rollout"))


@pytest.mark.exhaustive
def test_goes_on_after_kill_9_as_if_nothing_had_happened(whole_run: Path, rollcast_of_module: Commands) -> None:
    command = ["train", *SMALL, "run_dir=killed", "trainer.total_steps=6"]
    folder = rollcast_of_module.folder / "killed"
    process = rollcast_of_module.start(*command)
    # Past the checkpoint of step 2 and inside step 4.
    wait_for(lambda: len(read_metrics(folder)) >= 4, process)
    # Ray's own agents take up to a minute to notice; what holds the model must not.
    workers = [child for child in psutil.Process(process.pid).children(recursive=True) if _is_worker(child.name())]
    assert workers
    process.kill()
    process.communicate()
    assert_gone(workers)
    assert {path.name for path in (folder / "checkpoints").iterdir() if path.name.startswith("step_")} == {"step_2"}
    rollcast_of_module.must_run(*command)
    assert without_times(read_metrics(folder)) == without_times(read_metrics(whole_run))


@pytest.mark.exhaustive
def test_interrupt_stops_the_workers_and_keeps_the_checkpoint(rollcast: Commands) -> None:
    folder = rollcast.folder / "stopped"
    process = rollcast.start("train", *SMALL, "run_dir=stopped", "trainer.total_steps=5000", "trainer.test_freq=-1")
    wait_for(lambda: (folder / "checkpoints" / "step_2").exists(), process)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, out + err
    assert "Traceback" not in out + err
    assert "step_" in err
    assert_gone(children)
    checkpoints = [path for path in (folder / "checkpoints").iterdir() if path.name != "latest"]
    assert checkpoints
    assert all((checkpoint / "trainer.json").exists() for checkpoint in checkpoints)


@pytest.mark.exhaustive
def test_two_sharded_workers_draw_the_same_curve(whole_run: Path, rollcast_of_module: Commands) -> None:
    """Rows are sampled by their own seeds, so both go the same way until rounding makes a token another."""
    rollcast_of_module.must_run("train", *SMALL, "run_dir=two", "trainer.total_steps=6", "placement.n_gpus_per_node=2")
    one, two = read_metrics(whole_run), read_metrics(rollcast_of_module.folder / "two")
    assert [row["step"] for row in two] == [row["step"] for row in one]
    # Before the first step: the same weights, decoded greedily.
    assert two[0]["val/accuracy"] == one[0]["val/accuracy"]
    for key in ("rollout/tokens", "reward/mean", "actor/entropy", "actor/grad_norm"):
        assert two[1][key] == pytest.approx(one[1][key], rel=1e-4), key
    for ours, theirs in zip(two[1:], one[1:], strict=True):
        assert ours["actor/entropy"] == pytest.approx(theirs["actor/entropy"], rel=0.05)
        assert ours["rollout/logprob_gap_max"] <= 1e-4
