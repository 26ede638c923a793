"""The hook manager: installed listeners, broken ones, misspelt ones."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import pytest

from rollcast.contracts import hooks as hookspecs
from rollcast.contracts.hooks import build_hook_manager, hookimpl, hooks
from rollcast.errors import ConfigError, PluginError, PluginTypeError
from rollcast.plugins.health import report

GROUP = "rollcast.hooks"

EVENTS = {
    "on_configure": ("config",),
    "on_start_workers": ("workers", "runtime"),
    "on_fit_start": ("trainer",),
    "on_fit_end": ("trainer", "error"),
    "on_step_start": ("trainer", "step"),
    "on_step_end": ("trainer", "step", "metrics"),
    "on_batch_after_rollout": ("trainer", "step", "batch"),
    "on_batch_after_reward": ("trainer", "step", "batch"),
    "on_batch_after_advantage": ("trainer", "step", "batch"),
    "on_metrics": ("trainer", "step", "metrics"),
    "on_validation_end": ("trainer", "step", "metrics", "samples"),
    "on_checkpoint_saved": ("trainer", "step", "path"),
    "on_recovery": ("trainer", "step", "message"),
    "on_exception": ("trainer", "error"),
}


class Recorder:
    def __init__(self) -> None:
        self.steps: list[int] = []

    @hookimpl
    def on_step_end(self, step: int) -> None:
        self.steps.append(step)


def test_every_event_is_specified_with_its_arguments_and_a_docstring() -> None:
    found = {name: value for name, value in vars(hookspecs).items() if name.startswith("on_")}
    assert {name: tuple(inspect.signature(f).parameters) for name, f in found.items()} == EVENTS
    manager = build_hook_manager()
    for name, function in found.items():
        assert function.__doc__
        assert getattr(manager.hook, name).spec is not None


def test_objects_classes_and_modules_listen(make_dist) -> None:
    source = """
        from rollcast.contracts.hooks import hookimpl
        seen = []
        class Listener:
            @hookimpl
            def on_step_end(self, step, metrics):
                seen.append(("class", step, metrics["loss"]))
        class _Kept:
            @hookimpl
            def on_step_end(self, trainer):
                seen.append(("object", trainer))
        kept = _Kept()
    """
    module = """
        import tp_hooks
        from rollcast.contracts.hooks import hookimpl
        @hookimpl
        def on_step_end(step):
            tp_hooks.seen.append(("module", step))
    """
    points = {"class": "tp_hooks:Listener", "object": "tp_hooks:kept", "module": "tp_module"}
    make_dist("p", {GROUP: points}, {"tp_hooks.py": source, "tp_module.py": module})
    extra = Recorder()
    manager = build_hook_manager([extra])
    manager.hook.on_step_end(trainer="T", step=4, metrics={"loss": 0.5})
    import tp_hooks  # type: ignore[import-not-found]

    assert sorted(tp_hooks.seen) == [("class", 4, 0.5), ("module", 4), ("object", "T")]
    assert extra.steps == [4]
    build_hook_manager([tp_hooks.kept])  # installed and handed in: once


def test_extras_may_be_classes_and_several_of_a_kind() -> None:
    one, two = Recorder(), Recorder()
    manager = build_hook_manager([one, two, Recorder, one])
    assert len(manager.get_plugins()) == len(hooks.names()) + 3
    manager.hook.on_step_end(trainer=None, step=1, metrics={})
    assert one.steps == two.steps == [1]


@pytest.mark.parametrize(
    ("source", "piece"),
    [
        ("import tp_not_there", "tp_not_there"),
        ("assert False, 'oh no'", "oh no"),
        ("class L:\n    pass", "not marked|no function that is marked"),
        (
            "from rollcast.contracts.hooks import hookimpl\n"
            "class L:\n"
            "    def __init__(self, needed): ...\n"
            "    @hookimpl\n"
            "    def on_batch_after_reward(self, batch): ...",
            "needed",
        ),
    ],
)
def test_a_broken_installed_listener_is_a_warning(make_dist, caplog, source, piece) -> None:
    good = "from rollcast.contracts.hooks import hookimpl\n@hookimpl\ndef on_batch_after_reward(batch): batch.append('good')\n"
    make_dist("broken-hooks", {GROUP: {"broken": "tp_l:L"}}, {"tp_l.py": source})
    make_dist("good-hooks", {GROUP: {"good": "tp_good"}}, {"tp_good.py": good})
    with caplog.at_level(logging.WARNING, logger="rollcast.plugins"):
        manager = build_hook_manager()
    heard: list[str] = []
    manager.hook.on_batch_after_reward(batch=heard)
    assert heard == ["good"]
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "'broken'" in record.getMessage()
    assert "broken-hooks 1.0" in record.getMessage()
    assert any(each in record.getMessage() for each in piece.split("|"))


def test_a_misspelt_hook_names_the_plugin_and_the_nearest_hook(make_dist) -> None:
    source = "from rollcast.contracts.hooks import hookimpl\n@hookimpl\ndef on_step_finish(step): ...\n"
    make_dist("sloppy", {GROUP: {"s": "tp_s"}}, {"tp_s.py": source}, version="7.0")
    with pytest.raises(PluginError) as caught:
        build_hook_manager()
    text = str(caught.value)
    assert "sloppy 7.0" in text
    assert "'on_step_finish'" in text
    assert "did you mean 'on_step_" in text


class _WrongArgument:
    @hookimpl
    def on_step_end(self, stepp: int) -> None: ...


class _NoHooks:
    def on_step_end(self, step: int) -> None: ...


class _Failing:
    def __init__(self) -> None:
        raise RuntimeError("constructor")

    @hookimpl
    def on_step_end(self, step: int) -> None: ...


class _Far:
    @hookimpl
    def zzz(self) -> None: ...


@pytest.mark.parametrize(
    ("extra", "pieces"),
    [
        (_WrongArgument(), ["_WrongArgument", "stepp"]),
        (_NoHooks(), ["_NoHooks", "hookimpl"]),
        (_Failing, ["_Failing", "constructor"]),
        (_Far(), ["'zzz'", "on_metrics"]),
    ],
)
def test_a_wrong_extra_raises(extra: Any, pieces: list[str]) -> None:
    with pytest.raises(PluginTypeError) as caught:
        build_hook_manager([extra])
    for piece in pieces:
        assert piece in str(caught.value)


def test_an_optional_hook_may_be_unknown_and_specname_is_followed() -> None:
    class Optional:
        @hookimpl(optionalhook=True)
        def on_future_event(self) -> None: ...

        @hookimpl(specname="on_batch_after_reward")
        def extend(self, batch: list[str]) -> None:
            batch.append("extended")

        @property
        def never(self) -> int:
            raise AssertionError("properties must not run")

    manager = build_hook_manager([Optional()])
    heard: list[str] = []
    manager.hook.on_batch_after_reward(batch=heard)
    assert heard == ["extended"]


def test_a_listener_registered_in_process_is_found() -> None:
    recorder = Recorder()
    with hooks.temporarily("mine", recorder):
        build_hook_manager().hook.on_step_end(trainer=None, step=2, metrics={})
    assert recorder.steps == [2]


def test_installed_hooks_are_left_out_by_name(make_dist, caplog) -> None:
    source = "from rollcast.contracts.hooks import hookimpl\n@hookimpl\ndef on_batch_after_reward(batch): batch.append(__name__)\n"
    points = {"one": "tp_one", "two": "tp_two", "dead": "tp_not_there"}
    make_dist("p", {GROUP: points}, {"tp_one.py": source, "tp_two.py": source})
    with caplog.at_level(logging.WARNING, logger="rollcast.plugins"):
        manager = build_hook_manager(without={"one", "dead", "three"})
    heard: list[str] = []
    manager.hook.on_batch_after_reward(batch=heard)
    assert heard == ["tp_two"]
    (record,) = caplog.records
    assert "'three'" in record.getMessage()
    assert {"dead", "one", "two"} <= set(record.getMessage().partition("installed: ")[2].split(", "))


def test_an_error_in_a_listener_is_not_swallowed() -> None:
    class Bad:
        @hookimpl
        def on_batch_after_reward(self) -> None:
            raise RuntimeError("listener")

    with pytest.raises(RuntimeError, match="listener"):
        build_hook_manager([Bad()]).hook.on_batch_after_reward(batch=None)


def test_an_error_of_an_installed_listener_names_its_distribution(make_dist) -> None:
    source = """
        from rollcast.contracts.hooks import hookimpl
        from rollcast.errors import ConfigError
        @hookimpl
        def on_step_end(step):
            raise ConfigError("on purpose") if step else KeyError("lost")
    """
    make_dist("loud", {GROUP: {"l": "tp_loud"}}, {"tp_loud.py": source}, version="3.0")
    hook = build_hook_manager().hook
    with pytest.raises(PluginError, match=r"hooks 'l' of loud 3.0 \(tp_loud\) failed in on_step_end: KeyError: 'lost'"):
        hook.on_step_end(trainer=None, step=0, metrics={})
    with pytest.raises(ConfigError, match=r"^on purpose$"):
        hook.on_step_end(trainer=None, step=1, metrics={})


class _Static:
    @staticmethod
    @hookimpl
    def on_step_end(step: int, wide: bool = False) -> None: ...


class _Halfway(Recorder):
    def on_step_start(self, step: int) -> None: ...


@pytest.mark.parametrize(
    ("listener", "mistake"),
    [
        (Recorder, None),
        (Recorder(), None),
        (_Static, None),
        (_WrongArgument, "listens to 'on_step_end' with the argument 'stepp'; the hook has: trainer, step, metrics"),
        (_WrongArgument(), "listens to 'on_step_end' with the argument 'stepp'; the hook has: trainer, step, metrics"),
        (_Halfway, "has a function on_step_start, which is never called: mark it with"),
    ],
)
def test_mistakes_are_found_without_running_a_listener(listener: object, mistake: str | None) -> None:
    found = hookspecs.find_hook_mistake(listener)
    assert found == mistake if mistake is None else mistake in str(found)


def test_check_reports_listeners_and_trackers_that_would_hear_nothing(make_dist) -> None:
    source = """
        from rollcast.contracts.hooks import hookimpl
        from rollcast.contracts.tracker import BaseTracker
        @hookimpl
        def on_stepend(step): ...
        class Deaf(BaseTracker):
            @hookimpl
            def on_metrics(self, metric): ...
        class Misspelt(BaseTracker):
            @hookimpl
            def on_checkpoint_save(self, step): ...
        class Unmarked(BaseTracker):
            def on_metrics(self, step, metrics): ...
    """
    points = {
        GROUP: {"h": "tp_deaf"},
        "rollcast.trackers": {"t": "tp_deaf:Deaf", "m": "tp_deaf:Misspelt", "u": "tp_deaf:Unmarked"},
    }
    make_dist("deaf", points, {"tp_deaf.py": source})
    modules = ["rollcast.contracts.hooks", "rollcast.contracts.tracker"]
    found = report(check=True, groups=points, registries=modules)
    rows = {row.name: row for row in found if row.distribution == "deaf"}
    assert {row.state for row in rows.values()} == {"broken"}
    assert "did you mean 'on_checkpoint_saved'?" in rows["m"].cause
    assert "on_metrics, which is never called" in rows["u"].cause
    assert "did you mean 'on_step_end'?" in rows["h"].cause
    assert "'metric'; the hook has: trainer, step, metrics" in rows["t"].cause
