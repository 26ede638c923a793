"""What the trackers share: a thread, in which a library may fail, hang or be missing."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rollcast.contracts.tracker import trackers
from rollcast.errors import ConfigError, PluginLoadError
from rollcast_report.services.background import BackgroundTracker
from rollcast_report.tracker_set import TrackerSet

NAMES = ("clearml", "mlflow", "swanlab", "tensorboard", "trackio", "wandb")


class Recorder(BackgroundTracker):
    library = "made_up_library"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.fails: tuple[str, ...] = ()
        self.gate = threading.Event()
        self.gate.set()
        super().__init__(*args, **kwargs)

    def _note(self, *call: Any) -> None:
        self.gate.wait(60)
        self.calls.append(call)
        if call[0] in self.fails:
            raise OSError(f"{call[0]} failed")

    def open_run(self, library: Any) -> None:
        self._note("open", library.__name__, self.load_id())
        self.save_id("r1")

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self._note("metrics", step, dict(metrics))

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        self._note("samples", step, list(samples))

    def finish(self, error: BaseException | None) -> None:
        self._note("finish", error)


class Unopened(Recorder):
    def open_run(self, library: Any) -> None:
        raise ConnectionError("no server")


@pytest.fixture(autouse=True)
def library() -> Iterator[None]:
    sys.modules["made_up_library"] = ModuleType("made_up_library")
    yield
    del sys.modules["made_up_library"]


def test_calls_come_in_order(tmp_path: Path) -> None:
    tracker = Recorder(tmp_path, {}, max_samples=1)
    metrics = {"x": 1.0}
    tracker.on_metrics(1, metrics)
    metrics["x"] = 2.0  # the caller goes on with its own
    tracker.on_validation_end(1, [{"a": 1}, {"a": 2}])
    tracker.on_validation_end(2, [])
    tracker.on_metrics(2, metrics)
    error = KeyError("end")
    tracker.on_fit_end(error)
    tracker.close()
    tracker.close()
    assert tracker.calls == [
        ("open", "made_up_library", None),
        ("metrics", 1, {"x": 1.0}),
        ("samples", 1, [{"a": 1}]),
        ("metrics", 2, {"x": 2.0}),
        ("finish", error),
    ]


def test_a_continued_run_knows_its_name(tmp_path: Path) -> None:
    Recorder(tmp_path, {}).close()
    assert json.loads((tmp_path / "trackers" / "made_up_library.json").read_text()) == {"id": "r1"}
    continued = Recorder(tmp_path, {}, 3)
    continued.close()
    fresh = Recorder(tmp_path, {}, 0)
    fresh.close()
    assert [fresh.calls[0][2], continued.calls[0][2]] == [None, "r1"]
    assert continued.experiment_name == tmp_path.name


def test_a_library_that_raises(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracker = Recorder(tmp_path, {})
    tracker.fails = ("metrics",)
    with caplog.at_level(logging.WARNING):
        for step in range(5):
            tracker.on_metrics(step, {})
        tracker.close()
    assert [call[0] for call in tracker.calls] == ["open", *["metrics"] * 5, "finish"]
    assert [record.getMessage() for record in caplog.records] == [
        "made_up_library failed, and the run goes on (OSError: metrics failed)",
        "made_up_library failed 5 times, 0 calls left out",
    ]


def test_a_run_that_does_not_open(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracker = Unopened(tmp_path, {})
    with caplog.at_level(logging.WARNING):
        tracker.on_metrics(1, {})
        tracker.close()
    assert tracker.calls == []
    assert "ConnectionError: no server" in caplog.text
    assert "1 calls left out" in caplog.text


def test_a_library_that_hangs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No hook waits for it, however many calls there are, nor does the end of the run for long."""
    tracker = Recorder(tmp_path, {}, close_timeout_s=0.2)
    tracker.gate.clear()
    with caplog.at_level(logging.WARNING):
        for step in range(3000):
            tracker.on_metrics(step, {})
        tracker.close()
    assert "did not end within 0.2 s and is left behind" in caplog.text
    assert "calls left out" in caplog.text
    tracker.gate.set()
    tracker.close()


def test_options_out_of_their_range(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not negative"):
        Recorder(tmp_path, {}, max_samples=-1)


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_library_is_told_with_the_pip_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda library: None)
    with pytest.raises(PluginLoadError, match=rf"pip install 'rollcast-trackers\[{name}\]'"):
        TrackerSet([name])


@pytest.mark.parametrize("name", NAMES)
def test_wrong_options_are_told_with_the_right_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda library: object())
    assert trackers.get(name).library == name
    with pytest.raises(ConfigError, match=r"no option 'projct'; options: .*project_name, experiment_name"):
        TrackerSet([name], {name: {"projct": "x"}})


def test_the_modules_import_no_library() -> None:
    code = (
        "import sys, rollcast_report.services\n"
        f"for name in {NAMES}: __import__('rollcast_report.services.' + name + '_tracker')\n"
        f"sys.exit(', '.join({{'torch', 'ray', *{NAMES}}} & set(sys.modules)) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
