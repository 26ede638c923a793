"""Several trackers at once, and those that fail."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from rollcast.contracts.hooks import build_hook_manager, hookimpl
from rollcast.contracts.tracker import BaseTracker, trackers
from rollcast.errors import ConfigError, PluginLoadError, PluginNotFoundError, PluginTypeError
from rollcast_report.tracker_set import TrackerSet

EVENTS: list[tuple[Any, ...]] = []


class Listening(BaseTracker):
    def __init__(
        self, run_dir: Path, config: dict[str, Any], start_step: int = 0, label: str = "plain", wrong: bool = False
    ) -> None:
        super().__init__(run_dir, config, start_step)
        self.label = label
        if wrong:
            raise ConfigError("tracker_kwargs.test_listening.wrong is set")
        EVENTS.append(("created", label, run_dir, config, start_step))

    @hookimpl
    def on_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        EVENTS.append(("metrics", self.label, step, dict(metrics)))

    @hookimpl
    def on_checkpoint_saved(self, path: str) -> None:
        EVENTS.append(("checkpoint", self.label, path))

    def close(self) -> None:
        EVENTS.append(("closed", self.label))


class Failing(BaseTracker):
    @hookimpl
    def on_metrics(self, trainer: object, step: int, metrics: Mapping[str, float]) -> None:
        raise OSError(f"no connection in step {step}")

    def close(self) -> None:
        raise OSError("still no connection")


class Stillborn(BaseTracker):
    def __init__(self, run_dir: Path, config: dict[str, Any], start_step: int = 0, **kwargs: Any) -> None:
        super().__init__(run_dir, config, start_step)
        raise OSError("no server")


class Lacking(BaseTracker):
    @classmethod
    def check_requirements(cls) -> None:
        raise PluginLoadError("pip install something")


class Stopping(BaseTracker):
    @hookimpl
    def on_metrics(self, step: int) -> None:
        raise KeyboardInterrupt


class Misspelt(BaseTracker):
    @hookimpl
    def on_metric(self, step: int) -> None: ...


class WrongArgument(BaseTracker):
    @hookimpl
    def on_metrics(self, stepp: int) -> None: ...


PARTS = {
    "test_misspelt": Misspelt,
    "test_argument": WrongArgument,
    "test_listening": Listening,
    "test_failing": Failing,
    "test_stillborn": Stillborn,
    "test_lacking": Lacking,
    "test_stopping": Stopping,
}


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    for name, part in PARTS.items():
        trackers.register(name, part)
    EVENTS.clear()
    yield
    for name in PARTS:
        trackers.unregister(name)


def run(tmp_path: Path, names: list[str], options: dict[str, dict[str, Any]] | None = None, steps: int = 3) -> None:
    hooks = build_hook_manager()
    chosen = TrackerSet(names, options)
    chosen.start(hooks, tmp_path, {"a": 1}, 5)
    try:
        for step in range(steps):
            hooks.hook.on_metrics(trainer=None, step=step, metrics={"x": float(step)})
        hooks.hook.on_checkpoint_saved(trainer=None, step=1, path="there")
    finally:
        chosen.close()


def test_a_tracker_hears_events_and_gets_its_options(tmp_path: Path) -> None:
    run(tmp_path, ["test_listening"], {"test_listening": {"label": "mine"}}, steps=1)
    assert [
        ("created", "mine", tmp_path, {"a": 1}, 5),
        ("metrics", "mine", 0, {"x": 0.0}),
        ("checkpoint", "mine", "there"),
        ("closed", "mine"),
    ] == EVENTS


def test_failing_trackers_stop_neither_the_run_nor_the_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        run(tmp_path, ["test_failing", "test_listening", "test_stillborn"])
    assert [event[0] for event in EVENTS] == ["created", "metrics", "metrics", "metrics", "checkpoint", "closed"]
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        "tracker test_stillborn: was not created, and the run goes on without it (OSError: no server)",
        "tracker test_failing: on_metrics failed, and the run goes on (OSError: no connection in step 0)",
        "tracker test_failing failed 4 times in all; what it shows is not complete",
    ]
    # The operating system's errors explain themselves; a traceback is for bugs.
    assert not any(record.exc_info for record in caplog.records)


def test_an_interrupt_passes(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, ["test_stopping", "test_listening"])
    assert EVENTS[-1] == ("closed", "plain")


def test_what_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(PluginLoadError, match="pip install something"):
        TrackerSet(["test_listening", "test_lacking"])
    with pytest.raises(PluginNotFoundError, match="test_listning"):
        TrackerSet(["test_listning"])
    with pytest.raises(PluginTypeError, match=r"'test_misspelt'.*listens to 'on_metric'.*did you mean 'on_metrics'\?"):
        TrackerSet(["test_misspelt"])
    with pytest.raises(PluginTypeError, match=r"'test_argument'.*argument 'stepp'; the hook has: trainer, step"):
        TrackerSet(["test_argument"])
    with pytest.raises(ConfigError, match=r"test_listening: there is no option 'lable'; options: label, wrong"):
        TrackerSet(["test_listening"], {"test_listening": {"lable": "mine"}})
    with pytest.raises(ConfigError, match=r"tracker_kwargs.test_listening is set, but trackers has no"):
        TrackerSet(["test_failing"], {"test_listening": {"label": "mine"}})
    # Its **kwargs go to a base that takes none.
    with pytest.raises(ConfigError, match=r"test_stillborn: there is no option 'x'; options: none"):
        TrackerSet(["test_stillborn"], {"test_stillborn": {"x": 1}})
    with pytest.raises(ConfigError, match="wrong is set"):
        run(tmp_path, ["test_listening"], {"test_listening": {"wrong": True}})
    assert EVENTS == []


def test_a_set_closes_once(tmp_path: Path) -> None:
    chosen = TrackerSet(["test_listening"])
    chosen.start(build_hook_manager(), tmp_path, {}, 0)
    chosen.close()
    chosen.close()
    assert [event for event in EVENTS if event[0] == "closed"] == [("closed", "plain")]


def test_a_set_starts_again_after_its_end(tmp_path: Path) -> None:
    hooks, chosen = build_hook_manager(), TrackerSet(["test_listening"])
    for start_step in (0, 3):
        chosen.start(hooks, tmp_path, {}, start_step)
        hooks.hook.on_metrics(trainer=None, step=start_step + 1, metrics={})
        chosen.close()
    assert [event[-1] for event in EVENTS if event[0] == "created"] == [0, 3]
    assert [event[2] for event in EVENTS if event[0] == "metrics"] == [1, 4]
