"""The trackers pass the suite that third parties are given, each where its library is installed."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rollcast.contracts.tracker import BaseTracker, trackers
from rollcast_testing import TrackerSuite


class WithLibrary(TrackerSuite):
    """The suite of a tracker whose library may be missing, and writes into the user's home."""

    library: ClassVar[str]

    @pytest.fixture
    def tracker_class(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[BaseTracker]:
        pytest.importorskip(self.library)
        for variable in ("HOME", "HF_HOME", "CLEARML_CACHE_DIR", "TRACKIO_DIR"):
            monkeypatch.setenv(variable, str(tmp_path / "home"))
        monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        for folder in ("home", "elsewhere"):
            (tmp_path / folder).mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        monkeypatch.setattr(self, "options", self.settings(tmp_path), raising=False)
        return trackers.get(self.name)

    def settings(self, folder: Path) -> Mapping[str, Any]:
        """The tracker's options, for a test in ``folder``."""
        return {}


class TestTensorboard(WithLibrary):
    name = library = "tensorboard"

    def read(self, run_dir: Path) -> Sequence[tuple[int, float]]:
        module = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
        events = module.EventAccumulator(str(run_dir / "tensorboard"))
        events.Reload()
        return [(event.step, event.value) for event in events.Scalars("reward/mean")]


class TestMlflow(WithLibrary):
    name = library = "mlflow"
    drops_later_steps = False

    def settings(self, folder: Path) -> Mapping[str, Any]:
        self._uri = f"sqlite:///{folder / 'mlflow.db'}"
        client = importlib.import_module("mlflow").MlflowClient(self._uri)
        if client.get_experiment_by_name("rollcast") is None:
            client.create_experiment("rollcast", artifact_location=(folder / "artifacts").as_uri())
        return {"tracking_uri": self._uri}

    def read(self, run_dir: Path) -> Sequence[tuple[int, float]]:
        client = importlib.import_module("mlflow").MlflowClient(self._uri)
        experiment = client.get_experiment_by_name("rollcast").experiment_id
        (run,) = (run for run in client.search_runs([experiment]) if run.info.run_name == run_dir.name)
        history = client.get_metric_history(run.info.run_id, "reward/mean")
        return sorted((entry.step, entry.value) for entry in history)


class TestWandb(WithLibrary):
    name = library = "wandb"

    def settings(self, folder: Path) -> Mapping[str, Any]:
        return {"mode": "offline"}


class TestSwanlab(WithLibrary):
    name = library = "swanlab"

    def settings(self, folder: Path) -> Mapping[str, Any]:
        return {"mode": "offline"}


class TestTrackio(WithLibrary):
    name = library = "trackio"


def test_every_service_is_tested_here() -> None:
    ours = {name for name in trackers.names() if trackers.find(name).value.startswith("rollcast_report.services.")}
    here = [case for case in globals().values() if isinstance(case, type) and issubclass(case, TrackerSuite)]
    # ClearML forks a monitor for each task and waits for its analysis of the repository, so that several tasks in one
    # process may hang. `test_clearml_offline` has the only one.
    assert {case.name for case in here if case.name} == ours - {"clearml"}
