"""A URL for an option that takes a path is refused with one message, and no folder ``s3:`` is made."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from rollcast.cli.app import build_app, commands
from rollcast.contracts.reward import build_reward
from rollcast.errors import ConfigError
from rollcast.plugins.discovery import find_plugins

URL = "s3://bucket/x"
#: Command line → the option or argument that has the URL.
LINES = {
    f"chat model --opening {URL}": "--opening",
    f"dryrun --packages {URL}": "--packages",
    f"eval prompts.jsonl --output {URL}": "--output",
    f"eval prompts.jsonl --config-dir={URL}": "--config-dir",
    f"export run/checkpoints/step_1 out --config {URL}": "--config",
    f"generate prompts.jsonl {URL}": "OUTPUT",
    f"map --check run --check {URL}": "--check",
    f"map --lengths {URL}": "--lengths",
    f"map --simulate={URL}": "--simulate",
    f"map --write={URL}": "--write",
    f"new environment mine --into {URL}": "--into",
    f"preprocess gsm8k --output {URL}": "--output",
    f"preprocess gsm8k --output data --input {URL}": "--input",
    f"profile --output {URL}": "--output",
    f"replay {URL}": "RECORD",
    f"replay-trajectories run --output {URL}": "--output",
    f"replay-trajectories {URL}": "TRAJECTORIES",
    f"runs compare run {URL}": "RUN...",
    f"runs diff {URL} run": "RUN",
    f"runs diff run {URL}": "RUN",
    f"runs list {URL}": "FOLDER",
    f"runs report run --output {URL}": "--output",
    f"runs resume {URL}": "RUN",
    f"simulate --lengths {URL}": "--lengths",
    f"validate-task {URL}": "PROMPTS",
    f"verl-config verl.yaml --write {URL}": "--write",
    f"verl-config {URL}": "FILE",
    f"watch {URL}": "RUN",
}


def has_path(annotation: object) -> bool:
    return annotation is Path or any(has_path(part) for part in typing.get_args(annotation))


def functions_of(app: typer.Typer) -> Iterator[typing.Any]:
    """Yield the functions of an application's commands."""
    for command in app.registered_commands:
        yield command.callback
    for group in app.registered_groups:
        if group.typer_instance is not None:
            yield from functions_of(group.typer_instance)


def test_a_url_for_a_path_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    app, runner = build_app(), CliRunner()
    for line, name in LINES.items():
        done = runner.invoke(app, line.split())
        message = f"error: {name} must be a path on this machine, got the URL '{URL}'; mount the file system, or"
        assert (done.exit_code, message in done.output) == (2, True), (line, done.output)
        assert not list(tmp_path.iterdir()), line


def test_every_option_with_a_path_is_tried() -> None:
    tried = [line.split()[0] for line in LINES]
    for plugin in find_plugins(commands.group):
        if not plugin.owner.startswith("rollcast"):
            continue
        app = commands.get(plugin.name)
        paths = [
            name
            for function in functions_of(app)
            for name, annotation in typing.get_type_hints(function).items()
            if has_path(annotation) and name != "config_dir"
        ]
        assert tried.count(plugin.name) >= len(set(paths)), (plugin.name, paths)


@pytest.mark.parametrize("key", ["tables", "runs"])
def test_a_url_for_a_table_of_measured_costs_is_refused(key: str) -> None:
    from rollcast.config import build_section
    from rollcast_automap.profiling.measured_costs import MeasuredConfig

    says = rf"cost_model.{key}\[1\] must be a path on this machine, got the URL 's3://bucket/x'"
    with pytest.raises(ConfigError, match=says):
        build_section(MeasuredConfig, {key: ["here.json", URL]}, "cost_model")


def test_a_url_for_a_file_with_code_is_refused() -> None:
    from rollcast_agents.named import load_named

    says = " must be a path on this machine, got the URL 's3://bucket/x.py"
    with pytest.raises(ConfigError, match=f"reward.reward_kwargs.path{says}"):
        build_reward("function", {"path": f"{URL}.py:score"})
    with pytest.raises(ConfigError, match=f"agent.program{says}"):
        load_named(f"{URL}.py:run", "agent.program")
