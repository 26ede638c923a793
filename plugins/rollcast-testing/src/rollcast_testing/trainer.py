"""The conformance suite of trainers, a class of pytest tests to inherit.

The default task needs transformers, and whatever engine and rollout the trainer's configuration names: those of the
recipe of ``trainer=ppo`` are ``fsdp`` and ``hf``. Example, in a plugin's tests::

    from rollcast_testing import TrainerSuite

    class TestMyTrainer(TrainerSuite):
        name = "my_trainer"
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pytest

from rollcast import compose
from rollcast.contracts.hooks import hookimpl, hooks
from rollcast.contracts.tracker import BaseTracker, trackers
from rollcast.contracts.trainer import BaseTrainer, RunResult, trainers
from rollcast.errors import RollcastError
from rollcast_testing.checks import require
from rollcast_testing.tiny import tiny_model_folder

__all__ = ["TrainerSuite", "TrainerTask"]


@dataclass(frozen=True)
class TrainerTask:
    """A task of fifteen sums and a model of a few thousand parameters.

    Attributes:
        model: folder of the model and its tokenizer, one token per character.
        train, val: JSONL files with the columns ``prompt``, ``response`` and ``ground_truth``.
        reward: Python file with a function ``has_digit``, for ``reward=function``.
    """

    model: Path
    train: Path
    val: Path
    reward: Path

    @classmethod
    def write(cls, folder: Path) -> TrainerTask:
        """Write the task into ``folder``."""
        rows = [
            {"prompt": f"{a}+{b}=", "ground_truth": str(a + b), "response": f"{a + b}."}
            for a in range(4, 9)
            for b in range(3)
        ]
        for name, some in (("train", rows), ("val", rows[:4])):
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some), "utf-8")
        reward = "def has_digit(sample):\n    return float(any(letter.isdigit() for letter in sample.response))\n"
        (folder / "reward.py").write_text(reward, "utf-8")
        model = tiny_model_folder(folder / "model", hidden=32)
        return cls(model, folder / "train.jsonl", folder / "val.jsonl", folder / "reward.py")


@dataclass
class _Seen:
    """Events and metrics of a run."""

    events: list[tuple[str, int | None]] = field(default_factory=list)
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    errors: list[BaseException | None] = field(default_factory=list)


class TrainerSuite:
    """Conformance tests of one trainer, which trains a tiny model for two steps in this process.

    Set :attr:`name`; override :meth:`overrides` for a trainer with other keys than the first-party ones.
    """

    #: Name of the trainer in ``rollcast.trainers``.
    name: ClassVar[str] = ""
    #: Overrides of the configuration, after those of :meth:`overrides`.
    options: ClassVar[Sequence[str]] = ()
    #: True if the trainer calls the hooks of a run; trackers need them.
    emits_hooks: ClassVar[bool] = True
    #: True if a second start in the same ``run_dir`` continues from the last checkpoint.
    resumes: ClassVar[bool] = True
    #: True if the trainer reads ``trainer_kwargs``; one that does not has to refuse them.
    takes_kwargs: ClassVar[bool] = False

    def overrides(self, task: TrainerTask, run_dir: Path) -> list[str]:
        """Return the overrides of a run, other than its number of steps: task, sizes, and a checkpoint each step."""
        return [
            f"trainer={self.name}",
            f"run_dir={run_dir}",
            f"model.path={task.model}",
            f"data.train_files=[{task.train}]",
            f"data.val_files=[{task.val}]",
            "data.max_prompt_length=16",
            "data.max_response_length=6",
            "data.train_batch_size=4",
            "actor.optim.lr=1e-2",
            "actor.optim.eps=1e-4",
            "trainer.save_freq=1",
            "trainer.test_freq=-1",
            "runtime=local",
            "runtime.threads_per_worker=1",
        ]

    def is_timing(self, metric: str) -> bool:
        """Return True if a metric depends on the clock or the machine, so that runs need not agree on it."""
        return metric.startswith(("time/", "perf/")) or metric.endswith("_per_s")

    @pytest.fixture
    def trainer_class(self) -> type[BaseTrainer]:
        """Return the class under test; by default the plugin :attr:`name`."""
        if not self.name:
            raise NotImplementedError(f"{type(self).__name__} must set `name` or override the fixture `trainer_class`")
        return trainers.get(self.name, requested_by=f"{type(self).__name__}.name")

    @pytest.fixture
    def task(self, tmp_path: Path) -> TrainerTask:
        """Write the task of a test."""
        (tmp_path / "task").mkdir()
        return TrainerTask.write(tmp_path / "task")

    def launch(
        self, task: TrainerTask, run_dir: Path, *changes: str, steps: int = 2, fail_in: int | None = None
    ) -> tuple[RunResult, _Seen]:
        """Start a run as ``rollcast train`` does; return its result and its events.

        Args:
            task: task of the run.
            run_dir: directory of the run.
            changes: further overrides.
            steps: step after which the run ends.
            fail_in: step that fails at its start; None for none.

        Raises:
            RollcastError: the run failed.
        """
        seen = _Seen()
        asked = [*self.overrides(task, run_dir), f"trainer.total_steps={steps}", *self.options, *changes]
        with _watching(seen, fail_in):
            composed = compose([*asked, "trackers=[suite_watch]"])
            composed.load_plugins()
            config = composed.config
            try:
                return trainers.get(config.trainer.name).launch(config), seen
            except RollcastError:
                _last.append(seen)
                raise

    def test_it_trains(self, trainer_class: type[BaseTrainer], task: TrainerTask, tmp_path: Path) -> None:
        """Check result, metrics, and what is left of two steps."""
        before = _threads()
        result, seen = self.launch(task, tmp_path / "run")
        require(isinstance(result, RunResult), f"{trainer_class.__name__}.launch returns a RunResult, not {result!r}")
        require(result.step == 2, f"the run ends after trainer.total_steps=2, not {result.step}")
        require(Path(result.run_dir) == tmp_path / "run", f"its directory is run_dir, not {result.run_dir}")
        require((tmp_path / "run").is_dir(), "the directory of the run exists")
        values = {**result.metrics, **seen.metrics.get(2, {})}
        require(bool(values), "the run has metrics")
        wrong = {name: value for name, value in values.items() if not math.isfinite(float(value))}
        require(not wrong, f"metrics are finite numbers; these are not: {wrong}")
        left = sorted(_threads() - before)
        require(not left, f"workers and their threads have ended; these run on: {left}")

    def test_hooks_are_called_in_order(self, trainer_class: object, task: TrainerTask, tmp_path: Path) -> None:
        if not self.emits_hooks:
            pytest.skip("emits_hooks is False")
        _, seen = self.launch(task, tmp_path / "run")
        expected: list[tuple[str, int | None]] = [("fit_start", None)]
        for step in (1, 2):
            expected += [("step_start", step), ("metrics", step), ("step_end", step)]
        expected.append(("fit_end", None))
        events = [event for event in seen.events if event[0] != "checkpoint" and event != ("metrics", 0)]
        require(events == expected, f"the hooks of two steps are {expected}, not {events}")
        saved = [step for name, step in seen.events if name == "checkpoint"]
        require(saved == [1, 2], f"with trainer.save_freq=1 there is a checkpoint after each step, not {saved}")
        require(seen.errors == [None], f"on_fit_end is called once, without an error: {seen.errors}")

    def test_a_run_repeats_itself(self, trainer_class: object, task: TrainerTask, tmp_path: Path) -> None:
        first, second = (self.launch(task, tmp_path / name)[1] for name in ("first", "second"))
        self._require_same(second, first, "a second run with the same configuration")

    def test_a_resumed_run_is_the_uninterrupted_one(
        self, trainer_class: object, task: TrainerTask, tmp_path: Path
    ) -> None:
        """Check that step 2 after a restart has the metrics of an uninterrupted run, to the last bit."""
        if not self.resumes:
            pytest.skip("resumes is False")
        _, whole = self.launch(task, tmp_path / "whole")
        self.launch(task, tmp_path / "run", steps=1)
        result, resumed = self.launch(task, tmp_path / "run")
        require(result.step == 2, f"the resumed run ends after step 2, not {result.step}")
        steps = [step for name, step in resumed.events if name == "step_start"]
        require(steps == [2], f"a resumed run continues with step 2, not {steps}")
        self._require_same(resumed, whole, "a resumed run")

    def test_a_failed_run_is_told_and_can_go_on(self, trainer_class: object, task: TrainerTask, tmp_path: Path) -> None:
        """Check that a failure in step 2 ends the run with its error, and that a restart completes it."""
        if not self.emits_hooks:
            pytest.skip("emits_hooks is False: the suite has no place to fail")
        before = _threads()
        _last.clear()
        with pytest.raises(Exception, match="planted by the suite"):
            self.launch(task, tmp_path / "run", fail_in=2)
        seen = _last.pop()
        names = [name for name, _ in seen.events]
        require(names.count("fit_end") == 1, f"on_fit_end is called once, also after an error: {names}")
        require(names.count("exception") == 1, f"on_exception is called once: {names}")
        require(seen.errors[-1] is not None, "on_fit_end has the error")
        left = sorted(_threads() - before)
        require(not left, f"workers and their threads have ended; these run on: {left}")
        if self.resumes:
            result, _ = self.launch(task, tmp_path / "run")
            require(result.step == 2, f"a restart completes the run, to step 2, not {result.step}")

    def test_an_option_without_effect_is_refused(
        self, trainer_class: object, task: TrainerTask, tmp_path: Path
    ) -> None:
        if self.takes_kwargs:
            pytest.skip("takes_kwargs is True")
        with pytest.raises(RollcastError, match="trainer_kwargs"):
            self.launch(task, tmp_path / "run", "trainer_kwargs.an_option_that_nobody_has=1")
        require(not (tmp_path / "run").exists(), "a refused run writes nothing")

    def _require_same(self, actual: _Seen, expected: _Seen, what: str) -> None:
        last = max(expected.metrics, default=0)
        pair = [
            {name: value for name, value in seen.metrics.get(last, {}).items() if not self.is_timing(name)}
            for seen in (actual, expected)
        ]
        require(bool(pair[1]), "the last step has metrics")
        different = {
            name: (pair[0].get(name), pair[1].get(name))
            for name in {**pair[0], **pair[1]}
            if pair[0].get(name) != pair[1].get(name)
        }
        require(not different, f"step {last} of {what} has the same metrics to the last bit; these differ: {different}")


#: Events of the run that failed last.
_last: list[_Seen] = []


class _Watch(BaseTracker):
    """A tracker that records the events of a run in ``seen``, which a subclass sets."""

    seen: ClassVar[_Seen]

    @hookimpl
    def on_fit_start(self) -> None:
        self.seen.events.append(("fit_start", None))

    @hookimpl
    def on_fit_end(self, error: BaseException | None) -> None:
        self.seen.events.append(("fit_end", None))
        self.seen.errors.append(error)

    @hookimpl
    def on_step_start(self, step: int) -> None:
        self.seen.events.append(("step_start", step))

    @hookimpl
    def on_step_end(self, step: int) -> None:
        self.seen.events.append(("step_end", step))

    @hookimpl
    def on_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self.seen.events.append(("metrics", step))
        self.seen.metrics.setdefault(step, {}).update(metrics)

    @hookimpl
    def on_checkpoint_saved(self, step: int) -> None:
        self.seen.events.append(("checkpoint", step))

    @hookimpl
    def on_exception(self) -> None:
        self.seen.events.append(("exception", None))


class _Fail:
    """Hooks that fail at the start of ``step``, which a subclass sets."""

    step: ClassVar[int]

    @hookimpl
    def on_step_start(self, step: int) -> None:
        if step == self.step:
            raise RollcastError("planted by the suite")


@contextlib.contextmanager
def _watching(seen: _Seen, fail_in: int | None) -> Iterator[None]:
    """Register a tracker ``suite_watch`` that records a run, and hooks that fail in a step."""
    watch: type[BaseTracker] = type("Watch", (_Watch,), {"seen": seen})
    with trackers.temporarily("suite_watch", watch), contextlib.ExitStack() as stack:
        if fail_in is not None:
            stack.enter_context(hooks.temporarily("suite_fail", type("Fail", (_Fail,), {"step": fail_in})))
        yield


def _threads() -> set[str]:
    """Return names and numbers of the threads that keep a process from ending."""
    return {f"{thread.name} ({thread.ident})" for thread in threading.enumerate() if not thread.daemon}
