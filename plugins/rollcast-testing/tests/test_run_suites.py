"""The suites for runtimes, recipes, commands and hooks catch planted faults."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import click
import pytest
import typer
from broken_laws import broken_laws

from rollcast import ClassWithInitArgs
from rollcast.contracts.hooks import hookimpl
from rollcast.contracts.pools import NodeResources, ResourcePool
from rollcast.contracts.runtime import CallFailed, Host, LaunchSpec
from rollcast.errors import ConfigError
from rollcast_testing import CommandSuite, HooksSuite, RecipeSuite, RuntimeSuite, SimulatedRuntime
from rollcast_testing import commands as commands_suite

# -- runtimes --------------------------------------------------------------------------------------------------------


class Nodeless(SimulatedRuntime):
    def nodes(self) -> list[NodeResources]:
        return []


class Backwards(SimulatedRuntime):
    def launch(self, pool: ResourcePool, spec: LaunchSpec, timeout: float) -> list[Host]:
        return super().launch(pool, spec, timeout)[::-1]


class WithoutArguments(SimulatedRuntime):
    def launch(self, pool: ResourcePool, spec: LaunchSpec, timeout: float) -> list[Host]:
        bare = {role: ClassWithInitArgs(wanted.cls) for role, wanted in spec.roles.items()}
        return super().launch(pool, replace(spec, roles=bare), timeout)


class Sharing(SimulatedRuntime):
    started: list[Host] | None = None

    def launch(self, pool: ResourcePool, spec: LaunchSpec, timeout: float) -> list[Host]:
        if self.started is None or len(self.started) != pool.world_size:
            self.started = super().launch(pool, spec, timeout)
        return self.started


class Forgetful(SimulatedRuntime):
    def gather(self, refs: Sequence[Any], timeout: float | None) -> list[Any]:
        found = super().gather(refs, timeout)
        for ref in refs:
            for worker in ref.process.worker_host._workers.values():
                worker.count = 0
        return found


class Impatient(SimulatedRuntime):
    """The call that was sent last is executed first."""

    def gather(self, refs: Sequence[Any], timeout: float | None) -> list[Any]:
        numbers = sorted(sent.number for sent in self._queue)
        self._queue = type(self._queue)(reversed(self._queue))
        for sent, number in zip(self._queue, numbers, strict=True):
            sent.number = number
        return super().gather(refs, timeout)


class Mixing(SimulatedRuntime):
    def gather(self, refs: Sequence[Any], timeout: float | None) -> list[Any]:
        found = super().gather(refs, timeout)
        return found[::-1] if refs[0].method == "double" else found


class Swallowing(SimulatedRuntime):
    def gather(self, refs: Sequence[Any], timeout: float | None) -> list[Any]:
        try:
            return super().gather(refs, timeout)
        except CallFailed:
            return [None for _ in refs]


class Rewriting(SimulatedRuntime):
    """A worker's report is changed on its way."""

    changes: ClassVar[dict[str, Any]] = {}

    def gather(self, refs: Sequence[Any], timeout: float | None) -> list[Any]:
        try:
            return super().gather(refs, timeout)
        except CallFailed as failed:
            if failed.failure is None:
                raise
            raise CallFailed(failed.index, replace(failed.failure, **self.changes)) from failed


class Misattributing(Rewriting):
    changes: ClassVar[dict[str, Any]] = {"rank": 0}


class Causeless(Rewriting):
    changes: ClassVar[dict[str, Any]] = {"cause": None}


class Lenient(SimulatedRuntime):
    def launch(self, pool: ResourcePool, spec: LaunchSpec, timeout: float) -> list[Host]:
        try:
            return super().launch(pool, spec, timeout)
        except CallFailed:
            bare = {role: ClassWithInitArgs(wanted.cls) for role, wanted in spec.roles.items()}
            return super().launch(pool, replace(spec, roles=bare), timeout)


class Holding(SimulatedRuntime):
    """A thread keeps the process alive after ``shutdown``."""

    release = threading.Event()

    def shutdown(self) -> None:
        super().shutdown()
        threading.Thread(target=self.release.wait, args=(60,), name="forgotten").start()


class Once(SimulatedRuntime):
    is_down = False

    def shutdown(self) -> None:
        if self.is_down:
            raise RuntimeError("there is nothing to shut down")
        self.is_down = True
        super().shutdown()


class OfSimulated(RuntimeSuite):
    own_processes = False
    runtime_class: type[SimulatedRuntime] = SimulatedRuntime

    @classmethod
    def build(cls) -> SimulatedRuntime:
        return cls.runtime_class()


@pytest.fixture
def release() -> Iterator[None]:
    """Let the threads end that a fault has left."""
    Holding.release.clear()
    yield
    Holding.release.set()


@pytest.mark.parametrize(
    ("runtime", "law"),
    [
        (SimulatedRuntime, ""),
        (Nodeless, "the_cluster_has_nodes"),
        (Backwards, "each_rank_has_its_place"),
        (WithoutArguments, "each_rank_has_its_place"),
        (Sharing, "workers_keep_their_state"),
        (Forgetful, "workers_keep_their_state"),
        (Impatient, "calls_are_executed_in_order"),
        (Mixing, "a_batch_comes_back_in_order"),
        (Swallowing, "an_error_names_its_rank"),
        (Misattributing, "an_error_names_its_rank"),
        (Causeless, "an_error_names_its_rank"),
        (Lenient, "a_constructor_that_fails_ends_the_start"),
        (Holding, "shutdown_leaves_nothing"),
        (Once, "shutdown_leaves_nothing"),
    ],
)
@pytest.mark.usefixtures("release")
def test_faults_of_a_runtime_are_caught(runtime: type[SimulatedRuntime], law: str) -> None:
    suite = type("OfFaulty", (OfSimulated,), {"runtime_class": runtime})()
    built = suite.build()
    with suite.start_group(built) as group:
        found = broken_laws(suite, {"runtime": built, "shared_group": group})
    assert law in found if law else not found, found


def test_a_runtime_in_the_callers_process_has_no_processes_of_its_own() -> None:
    suite = OfSimulated()
    suite.own_processes = True  # type: ignore[misc]
    built = suite.build()
    with suite.start_group(built) as group:
        found = broken_laws(suite, {"runtime": built, "shared_group": group})
    assert {"each_rank_has_its_place", "the_environment_arrives"} <= set(found)


# -- recipes ---------------------------------------------------------------------------------------------------------

GOOD = """# @package _global_
defaults:
  - override /trainer: ppo
  - override /engine: fsdp
  - override /rollout: hf
model:
  path: model
data:
  train_files: [train.jsonl]
run_dir: runs/mine
"""
RECIPES = {
    "good": (GOOD, ""),
    "misspelt": (GOOD + "trainer:\n  total_stepz: 3\n", "it_composes"),
    "without_a_trainer": (GOOD.replace("  - override /trainer: ppo\n", ""), "it_composes"),
    "uninstalled": (GOOD + "reward:\n  name: nobody_has_this\n", "its_plugins_load"),
    "open": (GOOD.replace("path: model", "path: ???"), "nothing_is_missing"),
    "fixed_to_a_machine": (
        GOOD.replace("[train.jsonl]", "[/home/me/train.jsonl]"),
        "files_move_with_the_run_directory",
    ),
}


@pytest.mark.parametrize("name", RECIPES)
def test_faults_of_a_recipe_are_caught(name: str, tmp_path: Path) -> None:
    text, law = RECIPES[name]
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / f"{name}.yaml").write_text(text)

    class Suite(RecipeSuite):
        def compose(self, *more: str) -> Any:
            from rollcast import compose

            return compose([f"recipe={name}", *more], config_dir=tmp_path, needs_trainer=True)

    suite = Suite()
    suite.name = f"planted_{name}"  # type: ignore[misc]
    found = broken_laws(suite, {})
    assert law in found if law else not found, found


def test_a_recipe_that_changes_is_caught(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    file = tmp_path / "recipe" / "mine.yaml"

    class Suite(RecipeSuite):
        name = "planted_changing"
        number = 0

        def compose(self, *more: str) -> Any:
            from rollcast import compose

            self.number += 1
            file.write_text(GOOD + f"trainer:\n  seed: {self.number}\n")
            return compose(["recipe=mine", *more], config_dir=tmp_path, needs_trainer=True)

    assert set(broken_laws(Suite(), {})) == {"it_composes_the_same_each_time"}


# -- commands --------------------------------------------------------------------------------------------------------


def _command(body: Any = None, help_text: str | None = "Say hello.") -> click.Command:
    return click.Command("hello", callback=body, help=help_text, params=[click.Option(["--times"], type=int)])


class HelpWrites(click.Command):
    def get_help(self, ctx: click.Context) -> str:
        Path("cache").write_text("")
        return super().get_help(ctx)


class HelpFails(click.Command):
    def get_help(self, ctx: click.Context) -> str:
        raise ValueError("planted")


class Tolerant(click.Command):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return [] if any("nobody" in each for each in args) else super().parse_args(ctx, args)


def _crash(times: int | None) -> None:
    raise ValueError("planted")


def _refuse(times: int | None) -> None:
    raise ConfigError("there is nobody to greet; name somebody")


LISTED = "  hello    Say hello.\n"


@pytest.mark.parametrize(
    ("command", "listed", "bad", "law"),
    [
        (_command(), LISTED, ("--unknown",), ""),
        (_command(_refuse), LISTED, (), ""),
        (_command(_crash), LISTED, (), "a_wrong_call_is_one_message"),
        (Tolerant("hello"), LISTED, ("--nobody",), "a_wrong_call_is_one_message"),
        (_command(), "  other    Another.\n", ("--unknown",), "rollcast_help_has_its_line"),
        (_command(), "  hello    A command of somebody 1.0.\n", ("--unknown",), "rollcast_help_has_its_line"),
        (HelpWrites("hello"), LISTED, ("--unknown",), "it_has_a_help_text"),
        (HelpFails("hello"), LISTED, ("--unknown",), "it_has_a_help_text"),
    ],
)
def test_faults_of_a_command_are_caught(
    command: click.Command, listed: str, bad: Sequence[str], law: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands_suite, "_read_help", lambda: listed)

    class Suite(CommandSuite):
        name = "hello"
        bad_arguments: ClassVar[Sequence[str]] = bad

    found = broken_laws(Suite(), {"command": command})
    assert law in found if law else not found, found


def test_a_sub_command_without_help_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands_suite, "_read_help", lambda: LISTED)
    app = typer.Typer(name="hello")
    app.command("once")(lambda: None)
    app.command("twice")(lambda: None)

    class Suite(CommandSuite):
        name = "hello"
        sub_commands = (("once",), ("thrice",))

    assert set(broken_laws(Suite(), {"command": app})) == {"it_has_a_help_text"}


# -- hooks -----------------------------------------------------------------------------------------------------------


class Bell:
    """A listener that counts the steps of a run."""

    steps = 0

    @hookimpl
    def on_fit_start(self) -> None:
        self.steps = 0

    @hookimpl
    def on_step_end(self, step: int, metrics: Any) -> None:
        self.steps += 1

    @hookimpl
    def on_fit_end(self, error: BaseException | None) -> None:
        self.steps = 0


class Misspelt:
    @hookimpl
    def on_step_ends(self, step: int) -> None:
        """Never called."""


class WrongArgument:
    @hookimpl
    def on_step_end(self, number: int) -> None:
        """Never called."""


class NeedsATrainer:
    @hookimpl
    def on_fit_start(self, trainer: Any) -> None:
        self.steps = trainer.total_steps


class NeedsAMetric:
    @hookimpl
    def on_metrics(self, metrics: Any) -> None:
        self.last = metrics["val/accuracy"]


class OncePerProcess:
    is_open = False

    @hookimpl
    def on_fit_start(self) -> None:
        if self.is_open:
            raise RuntimeError("it runs already")
        self.is_open = True


@pytest.mark.parametrize(
    ("listener", "law"),
    [
        (Bell(), ""),
        (Misspelt(), "its_hooks_exist"),
        (WrongArgument(), "its_hooks_exist"),
        (NeedsATrainer(), "a_run_that_does_not_concern_it_goes_on"),
        (NeedsAMetric(), "a_run_that_does_not_concern_it_goes_on"),
        (OncePerProcess(), "two_runs_in_a_process_are_separate"),
    ],
)
def test_faults_of_hooks_are_caught(listener: Any, law: str) -> None:
    found = broken_laws(HooksSuite(), {"listener": listener})
    assert law in found if law else not found, found
