"""The conformance suite of trackers, a class of pytest tests to inherit.

Example, in a plugin's tests::

    from rollcast_testing import TrackerSuite

    class TestCsv(TrackerSuite):
        name = "csv"

        def read(self, run_dir):
            rows = [line.split(",") for line in (run_dir / "metrics.csv").read_text().splitlines()]
            return [(int(step), float(value)) for step, value in rows]
"""

from __future__ import annotations

import copy
import inspect
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rollcast.contracts.hooks import build_hook_manager, find_hook_mistake, hooks
from rollcast.contracts.tracker import BaseTracker, trackers
from rollcast_testing.checks import require

__all__ = ["TrackerSuite"]

#: Name of the metric that :meth:`TrackerSuite.read` returns.
METRIC = "reward/mean"


class TrackerSuite:
    """Conformance tests of one tracker: set :attr:`name`, and override :meth:`read` if records can be read back."""

    #: Name of the tracker in ``rollcast.trackers``.
    name: ClassVar[str] = ""
    #: Keys of ``tracker_kwargs.<name>`` for the tests.
    options: ClassVar[Mapping[str, Any]] = {}
    #: True if a continued run drops the records that an interrupted one wrote after its checkpoint; a server may keep
    #: them.
    drops_later_steps: ClassVar[bool] = True

    def read(self, run_dir: Path) -> Sequence[tuple[int, float]] | None:  # for those that override it
        """Return step and value of each record of the metric ``reward/mean``, in the order in which a user sees them.

        Override it; None skips the tests that need it.
        """
        return None

    @pytest.fixture
    def tracker_class(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[BaseTracker]:
        """Return the class under test, by default the plugin :attr:`name`; its working directory is empty."""
        if not self.name:
            raise NotImplementedError(f"{type(self).__name__} must set `name` or override the fixture `tracker_class`")
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        return trackers.get(self.name, requested_by=f"{type(self).__name__}.name")

    def record(
        self,
        tracker_class: type[BaseTracker],
        run_dir: Path,
        steps: Iterable[int],
        start_step: int = 0,
        metrics: Mapping[str, float] | None = None,
        error: BaseException | None = None,
        factor: float = 1.0,
    ) -> None:
        """Run the tracker over some steps as a run does, with every hook; exceptions of the tracker are raised.

        Args:
            tracker_class: the tracker.
            run_dir: directory of the run; made if it does not exist.
            steps: steps to record.
            start_step: step from which the run continues.
            metrics: further metrics of each step.
            error: exception that ends the run.
            factor: value of ``reward/mean`` divided by the step.
        """
        run_dir.mkdir(parents=True, exist_ok=True)
        manager = build_hook_manager(without=hooks.names())
        tracker = tracker_class(run_dir, self.config(), start_step, **copy.deepcopy(dict(self.options)))
        try:
            manager.register(tracker)
            manager.check_pending()
            call, last = manager.hook, start_step
            call.on_configure(config=self.config())
            call.on_fit_start(trainer=None)
            for step in steps:
                values = {METRIC: factor * step, "time/step_s": 0.5, **(metrics or {})}
                call.on_step_start(trainer=None, step=step)
                call.on_validation_end(trainer=None, step=step, metrics={"val/accuracy": 0.5}, samples=[_SAMPLE])
                call.on_metrics(trainer=None, step=step, metrics=values)
                call.on_checkpoint_saved(trainer=None, step=step, path=str(run_dir / "checkpoints" / str(step)))
                call.on_step_end(trainer=None, step=step, metrics=values)
                last = step
            if error is not None:
                call.on_exception(trainer=None, error=error)
            call.on_fit_end(trainer=None, error=error)
            require(last >= start_step, "steps follow the start step")
        finally:
            tracker.close()

    def config(self) -> dict[str, Any]:
        """Return the resolved configuration that the tracker receives."""
        return {"trainer": {"total_steps": 4, "name": "ppo"}, "data": {"train_files": ["a.jsonl"]}, "model": None}

    def test_its_hooks_exist(self, tracker_class: type[BaseTracker]) -> None:
        mistake = find_hook_mistake(tracker_class)
        require(mistake is None, f"every hook and every argument exists: it {mistake}")
        listens = any(hasattr(getattr(tracker_class, name, None), "rollcast_impl") for name in dir(tracker_class))
        require(listens, "it listens to at least one hook, marked with hookimpl")

    def test_its_requirements_are_met(self, tracker_class: type[BaseTracker]) -> None:
        tracker_class.check_requirements()

    def test_its_options_have_defaults(self, tracker_class: type[BaseTracker], tmp_path: Path) -> None:
        """Check the constructor: directory, config and start step, then options by keyword with defaults."""
        parameters = list(inspect.signature(tracker_class).parameters.values())
        names = [parameter.name for parameter in parameters[:3]]
        require(names == ["run_dir", "config", "start_step"], f"the first arguments are BaseTracker's, not {names}")
        plain = [
            parameter
            for parameter in parameters[3:]
            if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        ]
        bare = [parameter.name for parameter in plain if parameter.default is parameter.empty]
        require(not bare, f"options have defaults, because tracker_kwargs may be empty; without: {bare}")
        with pytest.raises(TypeError):
            tracker_class(tmp_path, self.config(), 0, an_option_that_nobody_has=1)  # type: ignore[call-arg]

    def test_a_run_is_recorded(
        self, tracker_class: type[BaseTracker], tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING):
            self.record(tracker_class, tmp_path / "run", range(1, 5))
        _require_silence(caplog)
        records = self.read(tmp_path / "run")
        if records is None:
            pytest.skip("the suite cannot read the records; override read()")
        expected = [(step, float(step)) for step in range(1, 5)]
        require(list(records) == expected, f"the records are the run's, in order: {list(records)}")

    def test_a_continued_run_appends(
        self, tracker_class: type[BaseTracker], tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING):
            self.record(tracker_class, tmp_path / "run", range(1, 3))
            self.record(tracker_class, tmp_path / "run", range(3, 5), start_step=2)
        _require_silence(caplog)
        records = self.read(tmp_path / "run")
        if records is None:
            pytest.skip("the suite cannot read the records; override read()")
        steps = [step for step, _ in records]
        require(steps == [1, 2, 3, 4], f"a continued run appends to the first: {steps}")

    def test_an_interrupted_run_is_written_again(self, tracker_class: type[BaseTracker], tmp_path: Path) -> None:
        """Check that records after the checkpoint of a run that died are replaced by the continued run's."""
        self.record(tracker_class, tmp_path / "run", range(1, 5))
        self.record(tracker_class, tmp_path / "run", range(3, 6), start_step=2, factor=10.0)
        records = self.read(tmp_path / "run")
        if records is None:
            pytest.skip("the suite cannot read the records; override read()")
        if not self.drops_later_steps:
            require({step for step, _ in records} == set(range(1, 6)), f"every step has a record: {list(records)}")
            return
        expected = [(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0), (5, 50.0)]
        law = f"steps after the checkpoint are the continued run's, once each: {list(records)}"
        require(list(records) == expected, law)

    def test_any_metrics_are_recorded(
        self, tracker_class: type[BaseTracker], tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Check that NaN, infinity, odd names and many metrics neither raise nor are changed."""
        odd = {
            "a": float("nan"),
            "b": float("inf"),
            "c": float("-inf"),
            "val/math 500/mean@4": 1e-30,
            "reward_component/a-b.c": 1,
            "é/β": 1e300,
            **{f"many/{number}": float(number) for number in range(300)},
        }
        original = copy.deepcopy(odd)
        with caplog.at_level(logging.WARNING):
            self.record(tracker_class, tmp_path / "run", range(1, 3), metrics=odd)
            self.record(tracker_class, tmp_path / "empty", ())
        _require_silence(caplog)
        require(repr(odd) == repr(original), "the metrics of the run are not changed")

    def test_a_failed_run_is_closed(
        self, tracker_class: type[BaseTracker], tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING):
            self.record(tracker_class, tmp_path / "run", range(1, 3), error=ValueError("lost a rank\nand another"))
        _require_silence(caplog)
        records = self.read(tmp_path / "run")
        if records is not None:
            require([step for step, _ in records] == [1, 2], f"a failed run keeps its records: {list(records)}")

    def test_it_closes_before_a_step(self, tracker_class: type[BaseTracker], tmp_path: Path) -> None:
        (tmp_path / "run").mkdir()
        tracker_class(tmp_path / "run", self.config(), 0, **copy.deepcopy(dict(self.options))).close()

    def test_two_runs_do_not_mix(self, tracker_class: type[BaseTracker], tmp_path: Path) -> None:
        self.record(tracker_class, tmp_path / "first", range(1, 3))
        self.record(tracker_class, tmp_path / "second", range(1, 5), factor=2.0)
        records = self.read(tmp_path / "first")
        if records is None:
            pytest.skip("the suite cannot read the records; override read()")
        require(list(records) == [(1, 1.0), (2, 2.0)], f"a run has its own records only: {list(records)}")

    def test_it_writes_into_the_run_directory(self, tracker_class: type[BaseTracker], tmp_path: Path) -> None:
        before, config = dict(os.environ), self.config()
        self.record(tracker_class, tmp_path / "run", range(1, 3))
        written = sorted(path.name for path in (tmp_path / "elsewhere").iterdir())
        require(not written, f"nothing is written into the working directory: {written}")
        require(config == self.config(), "the config is not changed")
        changed = [name for name, value in before.items() if os.environ.get(name) != value]
        require(not changed, f"variables of the environment are not changed: {changed}")


_SAMPLE = {"prompt": "2+2=", "response": "4", "score": 1.0, "correct": True, "data_source": "sums"}


def _require_silence(caplog: pytest.LogCaptureFixture) -> None:
    """Check that nothing was logged: a tracker that works in the background reports its failures so."""
    said = [record.getMessage() for record in caplog.records if record.name.startswith("rollcast")]
    require(not said, f"nothing fails, so nothing is logged: {said}")
