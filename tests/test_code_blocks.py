"""Every fenced block of the docs and READMEs is run or checked; a page with a block that no test covers fails.

- ``python`` with a title is run by the module of tests that ``RUN_BY`` names for its page; without one it is run
  here, in a namespace that ``SETUPS`` prepares for its page, or by the page's own test.
- ``bash``: each command of rollcast is parsed against the real command line and its configuration is composed; others
  have to name an existing session, file or distribution.
- ``yaml``, ``json`` and ``toml`` are parsed; entry points name groups that exist.
"""

from __future__ import annotations

import ast
import json
import re
import textwrap
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from code_blocks import CODE, ROOT, SHOWN, Block, blocks, commands, pages, without_environment
from packaging.requirements import InvalidRequirement, Requirement
from page_namespaces import SETUPS, enter, run_block

from rollcast import compose
from rollcast.config.overrides import Combination, expand_sweeps, parse_override
from rollcast.errors import ConfigError, PluginNotFoundError
from rollcast.plugins.discovery import describe_groups

pytestmark = pytest.mark.skipif(not (ROOT / "mkdocs.yml").is_file(), reason="only in the repository")

#: Page → module of tests that runs its titled blocks of Python (all of its Python if the page is in WHOLE).
RUN_BY = {
    "README.md": "tests/test_flat_grpo.py",
    "docs/agent-tokens.md": "tests/test_agents_pages.py",
    "docs/agents.md": "tests/test_agents_pages.py",
    "docs/algorithms.md": "tests/test_algorithms_page.py",
    "docs/asynchronous.md": "tests/test_asynchronous_page.py",
    "docs/coming-from-trl.md": "tests/test_trl_page.py",
    "docs/coming-from-verl.md": "tests/test_verl_page.py",
    "docs/conformance.md": "tests/test_conformance_page.py",
    "docs/configuration.md": "tests/test_code_blocks.py",
    "docs/cost-models.md": "tests/test_cost_models_page.py",
    "docs/doctor.md": "tests/test_doctor.py",
    "docs/engines.md": "tests/test_new_packages.py",
    "docs/hooks.md": "tests/test_kind_pages.py",
    "docs/openai-api.md": "tests/test_openai_page.py",
    "docs/profiling.md": "tests/test_profiling_page.py",
    "docs/rewards.md": "tests/test_rewards_pages.py",
    "docs/rollouts.md": "tests/test_rollouts_page.py",
    "docs/run-from-python.md": "tests/test_guide_pages.py",
    "docs/simulated-cluster.md": "tests/test_simulated_cluster_page.py",
    "docs/stages.md": "tests/test_stages_page.py",
    "docs/tiny-models.md": "tests/test_guide_pages.py",
    "docs/trackers.md": "tests/test_rewards_pages.py",
    "docs/train-an-openai-agent.md": "tests/test_agents_pages.py",
    "docs/tutorial.md": "tests/test_tutorial.py",
    "docs/write-a-command.md": "tests/test_kind_pages.py",
    "docs/write-a-dataset.md": "tests/test_kind_pages.py",
    "docs/write-a-device.md": "tests/test_kind_pages.py",
    "docs/write-a-planner.md": "tests/test_kind_pages.py",
    "docs/write-a-plugin.md": "tests/test_stranger_plugin.py",
    "docs/write-a-preprocessor.md": "tests/test_kind_pages.py",
    "docs/write-a-renderer.md": "tests/test_agents_pages.py",
    "docs/write-a-runtime.md": "tests/test_kind_pages.py",
    "docs/write-a-tool.md": "tests/test_agents_pages.py",
    "docs/write-a-trainer.md": "tests/test_kind_pages.py",
    "docs/write-a-weight-sync.md": "tests/test_kind_pages.py",
    "docs/write-an-admission.md": "tests/test_kind_pages.py",
    "docs/write-an-agent-loop.md": "tests/test_agents_pages.py",
    "docs/write-an-aggregation.md": "tests/test_kind_pages.py",
    "docs/write-an-engine-adapter.md": "tests/test_engine_adapter_page.py",
    "docs/write-an-environment.md": "tests/test_agents_pages.py",
    "docs/write-an-optimizer.md": "tests/test_kind_pages.py",
}
#: Pages whose blocks without a title are run by that module too.
WHOLE = {"docs/agent-tokens.md", "docs/simulated-cluster.md", "docs/write-an-engine-adapter.md"}
#: Programs of others that pages call, which are not checked any further.
OTHERS = {"curl", "ray", "source", "export", "cd", "pre-commit", "docker", "sbatch", "kubectl"}
#: Files that a page's commands name and its other blocks make.
MADE = re.compile(r"(make_data|use_\w+|first_run)\.py|rollcast-\w+(/tests)?")
DISTRIBUTIONS = {
    str(tomllib.loads(path.read_text())["project"]["name"])
    for pattern in ("core", "plugins/*", "contrib/*")
    for path in ROOT.glob(f"{pattern}/pyproject.toml")
}
ALL = [block for page in pages() for block in blocks(page)]


def of(*languages: str) -> Any:
    found = [block for block in ALL if block.language in languages]
    return pytest.mark.parametrize("block", found, ids=str)


def test_every_block_has_a_known_language() -> None:
    unknown = [f"{block} ({block.language})" for block in ALL if block.language not in (*CODE, *SHOWN)]
    assert not unknown, f"no test covers a block of this language: {', '.join(unknown)}"
    assert len(ALL) > 250


# -- Python -------------------------------------------------------------------------------------


@of("python")
def test_python_is_run_somewhere(block: Block) -> None:
    ast.parse(textwrap.dedent(block.text))
    if block.title or block.page in WHOLE:
        module = RUN_BY.get(block.page)
        assert module, f"{block}: add {block.page} to RUN_BY, and the test that runs its titled blocks"
        text = (ROOT / module).read_text()
        assert Path(block.page).name in text or module == "tests/test_code_blocks.py", f"{module} never reads {block}"
    else:
        assert block.page in SETUPS, f"{block}: give its page a namespace in SETUPS, or the block a title and a test"


@pytest.mark.parametrize("page", sorted({block.page for block in ALL if block.language == "python"}))
def test_untitled_python_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page in WHOLE:
        pytest.skip(f"{RUN_BY[page]} runs it")
    found = [block for block in blocks(page) if block.language == "python" and not block.title]
    if not found:
        pytest.skip("all its Python has titles")
    monkeypatch.chdir(tmp_path)
    with enter(page, monkeypatch) as namespace:
        for block in found:
            run_block(block.text, block.page, block.line, namespace)


def test_the_schemas_of_the_configuration_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rollcast import build_section

    for block in blocks("docs/configuration.md"):
        if block.title:
            file = tmp_path / block.title
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text)
    (tmp_path / "my_plugin" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    from my_plugin.conf import SCHEMAS  # type: ignore[import-not-found]

    (entry,) = SCHEMAS
    assert build_section(entry.schema, {"every": 3}, "clock").every == 3
    with pytest.raises(ConfigError, match=r"clock\.every"):
        build_section(entry.schema, {"every": 0}, "clock")
    sorting = compose(["recipe=sorting"], config_dir=tmp_path / "my")
    assert (sorting.config.trainer.total_steps, sorting.config.run_dir) == (30, "runs/sorting")
    mine = ["recipe=mine", "engine=fsdp", "model.path=x"]
    assert compose(mine, config_dir=tmp_path / "conf", allow_missing=True).config.actor.engine.share_prompts is True


# -- commands -----------------------------------------------------------------------------------


@of("bash", "shell")
def test_commands_exist(block: Block, tmp_path: Path) -> None:
    folders = config_folders(block.page, tmp_path)
    for given in commands(block):
        words = without_environment(given)
        if words:
            check(words, folders)


def config_folders(page: str, tmp_path: Path) -> Path:
    """A folder with the YAML files that a page shows, by their titles."""
    for block in blocks(page):
        if block.language == "yaml" and block.title:
            file = tmp_path / block.title
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text)
    return tmp_path


def check(words: list[str], folder: Path) -> None:
    program, *arguments = words
    program = Path(program).name
    if program == "ray" and "--" in arguments:
        check(arguments[arguments.index("--") + 1 :], folder)
    elif program == "rollcast":
        check_rollcast(arguments, folder)
    elif program == "python" and arguments[:2] == ["-m", "nox"]:
        check_nox(arguments[2:])
    elif program in ("pip", "python") and "install" in arguments:
        check_pip(arguments[arguments.index("install") + 1 :])
    elif program in ("python", "pytest"):
        if arguments[:1] != ["-m"]:
            file = arguments[0]
            assert (ROOT / file).exists() or MADE.fullmatch(file), f"there is no {file}"
    else:
        assert program in OTHERS, f"{program} is neither a program of this repository nor in OTHERS"


def check_nox(arguments: list[str]) -> None:
    sessions = set(re.findall(r"^def (\w+)\(session", (ROOT / "noxfile.py").read_text(), re.MULTILINE))
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    asked = [word.partition("(")[0] for word in options if not word.startswith("-")]
    assert asked, arguments
    assert set(asked) <= sessions, f"noxfile.py has no session {set(asked) - sessions}"


def check_pip(arguments: list[str]) -> None:
    for before, word in zip(["", *arguments], arguments, strict=False):
        name = word.partition("/")[0]
        if before == "-e" and MADE.fullmatch(word):
            continue
        if word.startswith(("-", ".", "dist")) or (ROOT / name).exists() or not word.startswith("rollcast"):
            continue
        try:
            assert Requirement(word).name in DISTRIBUTIONS, f"there is no distribution {word}"
        except InvalidRequirement:
            assert MADE.fullmatch(word), word


_ELISIONS = ("...", "…")


def check_rollcast(arguments: list[str], folder: Path) -> None:
    """Parse a command with the real command line; compose its overrides."""
    from rollcast.cli.app import build_app

    if arguments[:1] == ["--install-completion"]:
        return
    elided = any(word in _ELISIONS for word in arguments)
    words = [word for word in arguments if word not in _ELISIONS]
    app = typer.main.get_command(build_app())
    with app.make_context("rollcast", list(words), resilient_parsing=False) as context:
        name, command, rest = app.resolve_command(context, [*context._protected_args, *context.args])
        assert name is not None
        if type(command).__name__ == "_Forwarder":
            command, rest = plugin_command(name, rest)
        parsed = command.make_context(name, list(rest), parent=context)
    overrides = [str(word) for word in parsed.params.get("overrides") or ()]
    if name == "preprocess":
        return
    if overrides or name in ("train", "config"):
        runs = expand_sweeps(overrides) if parsed.params.get("multirun") else [Combination(tuple(overrides), ())]
        for run in runs:
            compose_them(name, list(run.overrides), elided, parsed.params.get("config_dir"), folder)


def plugin_command(name: str, rest: list[str]) -> tuple[Any, list[str]]:
    from rollcast.cli.app import commands as registry

    found = registry.get(name)
    command = typer.main.get_command(found) if isinstance(found, typer.Typer) else found
    if hasattr(command, "commands") and rest:
        assert rest[0] in command.commands, f"rollcast {name} has no command {rest[0]}"
        return command.commands[rest[0]], rest[1:]
    return command, rest


def compose_them(name: str, overrides: list[str], elided: bool, config_dir: Path | None, folder: Path) -> None:
    given = [word for word in overrides if not word.startswith("mapping=")]  # its file is written by another command
    chosen = {parse_override(word).key for word in given}
    if name in ("generate", "eval", "validate-task", "replay-trajectories"):
        from rollcast_eval.composition import compose_samples

        compose_samples(given if "model.path" in str(chosen) else [*given, "model.path=MODEL"])
        return
    if elided or not chosen & {"recipe", "trainer", "trainer.name"}:
        given = ["trainer=ppo", *given]
    try:
        compose(given, config_dir=folder / config_dir if config_dir else None, allow_missing=True)
    except PluginNotFoundError as error:
        assert is_made_on_a_page(str(error)), error
    except ConfigError as error:
        # Keys of the command, such as cluster.nodes, belong to the command and not to the run.
        own = ("cluster.", "cost_model.", "grader.")
        kept = [word for word in given if not word.startswith(own)]
        if len(kept) == len(given):
            raise
        assert error
        compose(kept, allow_missing=True)


def is_made_on_a_page(message: str) -> bool:
    """True if the plugin that is missing is announced by a block of a page."""
    name = re.search(r"no plugin '([^']+)'", message)
    announced = "\n".join(block.text for block in ALL if block.language == "toml")
    made = {*re.findall(r'^"?([\w-]+)"? = ', announced, re.MULTILINE), "mine", "half"}
    return name is not None and name[1] in made


# -- data ---------------------------------------------------------------------------------------


@of("toml")
def test_entry_points_name_groups(block: Block) -> None:
    parsed = tomllib.loads(block.text)
    groups = parsed.get("project", {}).get("entry-points", {})
    assert set(groups) <= set(describe_groups()), set(groups) - set(describe_groups())
    for requirement in parsed.get("project", {}).get("dependencies", ()):
        assert Requirement(requirement).name


@of("yaml")
def test_yaml_is_a_configuration(block: Block, tmp_path: Path) -> None:
    from omegaconf import OmegaConf

    tree = OmegaConf.create(block.text)
    if not block.text.startswith("# @package"):
        compose(
            ["trainer=ppo", *(f"{key}={flat(OmegaConf.to_container(tree)[key])}" for key in tree)], allow_missing=True
        )


def flat(value: Any) -> str:
    """A value in the notation of overrides."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {flat(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(flat, value)) + "]"
    return json.dumps(value)


@of("math")
def test_formulas_convert(block: Block) -> None:
    latex2mathml = pytest.importorskip("latex2mathml.converter", reason="nox -s docs converts them")
    assert "<math" in latex2mathml.convert(block.text.strip())


@of("json")
def test_json_parses(block: Block) -> None:
    assert json.loads(block.text)


# -- the registry itself ------------------------------------------------------------------------


def test_a_planted_block_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A block that nothing runs is found: unknown command, key, session, group, page."""
    cases: list[tuple[Callable[[Block], object], str, str]] = [
        (lambda block: test_commands_exist(block, tmp_path), "bash", "rollcast trian recipe=quickstart\n"),
        (lambda block: test_commands_exist(block, tmp_path), "bash", "rollcast train recipe=quickstart no.key=1\n"),
        (lambda block: test_commands_exist(block, tmp_path), "bash", "rollcast train --no-option recipe=quickstart\n"),
        (lambda block: test_commands_exist(block, tmp_path), "bash", "python -m nox -s no_session\n"),
        (lambda block: test_commands_exist(block, tmp_path), "bash", "pip install rollcast-nothing\n"),
        (test_entry_points_name_groups, "toml", '[project.entry-points."rollcast.nothing"]\na = "b:c"\n'),
        (test_python_is_run_somewhere, "python", "import torch\n"),
    ]
    for test, language, text in cases:
        block = Block("docs/security.md", 1, language, "", text)
        with pytest.raises((AssertionError, ConfigError, typer._click.exceptions.UsageError)):
            test(block)
