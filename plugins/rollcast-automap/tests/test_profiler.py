"""Profilers in a run: which steps and workers they see, and what is refused."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_tools import SmallTask, before_stage, launch, read_metrics, without_times

from rollcast import Worker
from rollcast.config import compose
from rollcast.contracts.worker import ClassWithInitArgs
from rollcast.errors import CapabilityError, ConfigError, PluginNotFoundError
from rollcast_automap.profiling.contract import BaseProfiler, profilers
from rollcast_automap.profiling.schemas import NsysConfig
from rollcast_automap.profiling.stepper import StepProfiler
from rollcast_automap.profiling.tools import NsysProfiler
from rollcast_ray import RayRuntime
from rollcast_trainer.api import PpoTrainer, Run, RunSettings, check_run
from rollcast_trainer.workers.roles import Role

pytestmark = pytest.mark.long


def names_in(trace: Path) -> set[str]:
    """Names of the events in a trace."""
    with gzip.open(trace, "rt") as file:
        return {event.get("name", "") for event in json.load(file)["traceEvents"]}


def files_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def build(overrides: list[str]) -> RunSettings:
    config = compose(overrides).config
    return check_run(config)


@pytest.fixture
def plain_run(small_task: SmallTask, tmp_path: Path) -> list[dict[str, Any]]:
    launch(small_task.ppo(tmp_path / "plain"))
    return without_times(read_metrics(tmp_path / "plain"))


def test_traces_of_the_chosen_steps(small_task: SmallTask, tmp_path: Path, plain_run: list[dict[str, Any]]) -> None:
    changes = ["profiler=torch", "profiler.steps=[2,3]", "profiler.contents=[cpu,memory]"]
    launch(small_task.ppo(tmp_path / "run", *changes))
    folder = tmp_path / "run" / "profiles"
    assert files_of(folder) == [f"step_{step}-global_pool-rank_0.pt.trace.json.gz" for step in (2, 3)]
    for file in folder.iterdir():
        found = names_in(file)
        assert {"actor_rollout.generate_sequences", "actor_rollout.update_actor", "aten::mm", "[memory]"} <= found
        # Under the runtime `local` the loop is in the worker's process.
        assert f"step {5 - int(file.name[5])}" not in found
    assert without_times(read_metrics(tmp_path / "run")) == plain_run


def test_steps_that_follow_each_other_in_one_file(small_task: SmallTask, tmp_path: Path) -> None:
    section = {
        "tool": "torch",
        "steps": [1, 2, 4],
        "profile_continuous_steps": True,
        "save_path": str(tmp_path / "out"),
    }
    launch(small_task.ppo(tmp_path / "run", *(f"profiler.{key}={value}" for key, value in section.items())))
    assert files_of(tmp_path / "out") == [
        "step_4-global_pool-rank_0.pt.trace.json.gz",
        "steps_1-2-global_pool-rank_0.pt.trace.json.gz",
    ]
    assert {"actor_rollout.generate_sequences"} <= names_in(tmp_path / "out" / files_of(tmp_path / "out")[1])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["profiler=torch"], r"profiler.tool=torch, but profiler.steps is empty; give steps, such as \[3,4\]"),
        (["profiler=torch", "profiler.steps=[0]"], "steps count from 1"),
        (["profiler=torch", "profiler.steps=[1]", "profiler.ranks=[]"], "give ranks from 0, or profiler.all_ranks"),
        (
            ["profiler=torch", "profiler.steps=[1]", "profiler.roles=[judge]"],
            "names judge; roles: actor_rollout, .*critic",
        ),
        (
            ["profiler=torch", "profiler.steps=[1]", "profiler.contents=[gpu]"],
            "contents must be a list of cpu, cuda, mem",
        ),
        (["profiler=torch", "profiler.steps=[1]", "profiler.contents=[stack]"], "it needs cpu or cuda"),
        (
            ["profiler=torch_memory", "profiler.steps=[1]", "profiler.context=some"],
            "profiler.context must be one of all, alloc, state, got 'some'",
        ),
        (
            ["profiler=torch_memory", "profiler.steps=[1]", "profiler.stack_depth=0"],
            "profiler.stack_depth must be at least 1, got 0",
        ),
        (["profiler=nsys", "profiler.steps=[1]", "profiler.options={output: x}"], "names output, which the profiler"),
    ],
)
def test_wrong_values_are_refused_before_anything_starts(
    small_task: SmallTask, tmp_path: Path, changes: list[str], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        build(small_task.ppo(tmp_path / "run", *changes))
    assert not (tmp_path / "run").exists()


def test_wrong_names_are_refused_with_what_exists(small_task: SmallTask, tmp_path: Path) -> None:
    with pytest.raises(PluginNotFoundError, match=r"profiler\.tool[\s\S]*nsys .*torch .*torch_memory "):
        compose(small_task.ppo(tmp_path, "profiler.tool=npu"))
    with pytest.raises(ConfigError, match=r"no key 'profiler.content'; did you mean 'profiler.contents'"):
        compose(small_task.ppo(tmp_path, "profiler=torch", "profiler.content=[cpu]"))


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        (["profiler.tool=torch", "profiler.ranks=[1]"], ConfigError, "the largest pool has 1 processes"),
        (["profiler.tool=torch", "profiler.roles=[critic]"], ConfigError, "its roles: actor_rollout"),
        (["profiler.tool=nsys"], ConfigError, "capability runtime_env.*LocalRuntime"),
        pytest.param(
            ["profiler.tool=torch_memory"],
            CapabilityError,
            "the worker has no CUDA device; on a CPU profiler=torch",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device"),
        ),
        pytest.param(
            ["profiler=torch", "profiler.contents=[cuda]"],
            CapabilityError,
            "has no cpu, and the worker has no CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device"),
        ),
    ],
)
def test_what_the_workers_cannot_do_is_refused_before_the_first_step(
    small_task: SmallTask, tmp_path: Path, changes: list[str], error: type[Exception], says: str
) -> None:
    with pytest.raises(Exception, match=says) as raised:
        launch(small_task.ppo(tmp_path / "run", *changes, "profiler.steps=[1]"))
    assert isinstance(raised.value.__cause__ if raised.type.__name__ == "WorkerError" else raised.value, error)
    written = tmp_path / "run" / "metrics.jsonl"
    assert not written.exists() or not written.read_text()


class Clumsy(BaseProfiler):
    """Fails where its ``save_path`` says."""

    def start(self, name: str) -> None:
        if self.folder.name == "start":
            raise OSError("no room")

    def stop(self) -> list[Path]:
        raise OSError("no room")


@pytest.fixture
def clumsy() -> Iterator[None]:
    profilers.register("clumsy", Clumsy)
    yield
    profilers.unregister("clumsy")


@pytest.mark.usefixtures("clumsy")
@pytest.mark.parametrize("when", ["start", "stop"])
@pytest.mark.cases(1)
def test_a_profiler_that_fails_is_given_up_and_the_run_goes_on(
    small_task: SmallTask,
    tmp_path: Path,
    when: str,
    plain_run: list[dict[str, Any]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    changes = ["profiler.tool=clumsy", "profiler.steps=[1,3]", f"profiler.save_path={tmp_path / when}"]
    launch(small_task.ppo(tmp_path / "run", *changes))
    complaints = [record.message for record in caplog.records if "given up" in record.message]
    assert complaints == ["profiler.tool=clumsy failed and is given up: rank 0: OSError: no room"]
    assert without_times(read_metrics(tmp_path / "run")) == plain_run


def test_a_run_that_fails_within_a_profiled_step_leaves_its_trace(small_task: SmallTask, tmp_path: Path) -> None:
    def build_trainer(name: str, step: int) -> PpoTrainer:
        changes = ["profiler=torch", f"profiler.steps=[{step}]"]
        return PpoTrainer(Run(build(small_task.ppo(tmp_path / name, *changes))))

    trainer = build_trainer("run", 2)

    def fail(state: Any) -> None:
        raise ZeroDivisionError if trainer.step == 1 else LookupError

    before_stage(trainer, "advantage", fail)
    with trainer.run, pytest.raises(LookupError):
        trainer.fit()
    assert not (tmp_path / "run" / "profiles").exists() or files_of(tmp_path / "run" / "profiles") == []
    second = build_trainer("other", 1)
    before_stage(second, "advantage", fail)
    with second.run, pytest.raises(LookupError):
        trainer.run.completed = 0
        second.fit()
    assert {"actor_rollout.generate_sequences"} <= names_in(next((tmp_path / "other" / "profiles").iterdir()))


def test_nsys_starts_the_processes_of_the_chosen_roles(tmp_path: Path) -> None:
    config = NsysConfig(steps=[2, 3, 7], roles=["critic"], options={"delay": "1"}, save_path=str(tmp_path / "out"))
    profiler = StepProfiler(config, tmp_path, NsysProfiler)
    workers = {role: ClassWithInitArgs(Worker) for role in (Role.ACTOR_ROLLOUT_REF, Role.CRITIC, Role.ROLLOUT)}
    equipped = dict(workers)
    profiler.equip(equipped, RayRuntime())
    assert [equipped[role].runtime_env for role in (Role.ACTOR_ROLLOUT_REF, Role.ROLLOUT)] == [{}, {}]
    assert equipped[Role.CRITIC].runtime_env["nsight"] == {
        "trace": "cuda,nvtx,cublas",
        "cuda-memory-usage": "true",
        "cuda-graph-trace": "graph",
        "delay": "1",
        "capture-range": "cudaProfilerApi",
        "capture-range-end": "repeat-shutdown:3",
        "kill": "none",
        "o": f"{tmp_path / 'out'}/worker_%p",
    }
    assert (tmp_path / "out").is_dir()
    with pytest.raises(ConfigError, match="has a space"):
        StepProfiler(config, tmp_path, NsysProfiler)._tool.runtime_env(config, tmp_path / "a b", 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_snapshot_of_the_cuda_allocator(small_task: SmallTask, tmp_path: Path) -> None:
    launch(small_task.ppo(tmp_path / "run", "profiler=torch_memory", "profiler.steps=[1]"))
    (file,) = (tmp_path / "run" / "profiles").iterdir()
    assert file.name == "step_1-global_pool-rank_0.snapshot.pickle"
    assert file.stat().st_size > 1000
