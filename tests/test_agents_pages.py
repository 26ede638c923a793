"""The pages about agents: their packages are built, installed and pass their suites; their code runs."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from page_packages import DOCS, PagePackage, titled_blocks
from run_commands import Commands, read_metrics

from rollcast_testing.tiny import CHAT_TEMPLATE, tiny_model_folder

#: Page and distribution, with the parts that it announces.
PACKAGES = {
    "write-an-environment.md": (
        "rollcast-games",
        {("rollcast.environments", "shop"), ("rollcast.environments", "guess")},
    ),
    "write-a-tool.md": ("rollcast-desk", {("rollcast.tools", "convert"), ("rollcast.tools", "notes")}),
    "write-a-renderer.md": ("rollcast-lines", {("rollcast.renderers", "lines")}),
    "write-an-agent-loop.md": ("rollcast-reflect", {("rollcast.agent_loops", "reflect")}),
}


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> PagePackage:
    """All packages of the pages, in one environment."""
    (first, (name, _)), *others = PACKAGES.items()
    installed = PagePackage(first, name, tmp_path_factory.mktemp("agents"))
    for page, (name, _) in others:
        installed.add(page, name)
    return installed


def test_each_package_passes_its_suites(packages: PagePackage) -> None:
    folders = [f"{name}/tests" for name, _ in PACKAGES.values()]
    listed = packages.run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-rA", *folders)
    for name, _ in PACKAGES.values():
        file = f"test_{name.removeprefix('rollcast-')}.py"
        assert len(re.findall(rf"^PASSED \S*{file}::", listed, re.MULTILINE)) >= 5, name


def test_the_parts_are_announced(packages: PagePackage) -> None:
    listed = json.loads(packages.rollcast("plugins", "--json", "--check"))
    parts = listed["parts"] if isinstance(listed, dict) else listed
    for name, announced in PACKAGES.values():
        rows = [part for part in parts if part["distribution"] == name]
        assert {(row["group"], row["name"]) for row in rows} == announced
        assert {row["state"] for row in rows} == {"ok"}


#: A command of a page becomes one of seconds.
SMALL = (
    *("model.path=model", "runtime=local", "data.train_batch_size=4", "rollout.n=4", "actor.ppo_mini_batch_size=2"),
    *("data.max_prompt_length=256", "data.max_response_length=200", "data.val_max_samples=1", "trainer.total_steps=1"),
    "agent.max_response_length=24",
)


@pytest.fixture
def tasks(rollcast: Commands) -> Commands:
    """The tasks of the first page beside a tiny model."""
    tiny_model_folder(rollcast.folder / "model", hidden=32, chat_template=CHAT_TEMPLATE)
    for file in ("tools.py", "make_data.py", "rewards.py"):
        (rollcast.folder / file).write_text(titled_blocks("agents.md")[file])
    return rollcast


def _train(rollcast: Commands, page: str) -> Path:
    """Run the page's command, small; return its run directory."""
    *before, command = titled_blocks(page)["train.sh"].replace("\\\n", " ").splitlines()
    assert before in ([], ["python make_data.py"])
    _write_data(rollcast.folder)
    _, *arguments = shlex.split(command)
    rollcast.must_run(*arguments, *SMALL)
    return rollcast.folder / dict(each.split("=", 1) for each in arguments if "=" in each)["run_dir"]


def _write_data(folder: Path) -> None:
    source = (folder / "make_data.py").read_text().replace('f"{name}.jsonl"', f'f"{folder}/{{name}}.jsonl"')
    exec(compile(source, "make_data.py", "exec"), {})


def _trajectories(run_dir: Path) -> list[dict[str, object]]:
    lines = [path.read_text().splitlines() for path in sorted(run_dir.glob("trajectories/*.jsonl"))]
    return [json.loads(line) for each in lines for line in each]


def test_agents_in_ten_minutes(tasks: Commands) -> None:
    run_dir = _train(tasks, "agents.md")
    rows = [row for row in read_metrics(run_dir) if row["step"] > 0]
    assert [row["agent/rollouts"] for row in rows] == [16]
    assert all(row["rollout/logprob_gap_max"] < 1e-4 for row in rows)
    page = (DOCS / "agents-in-training.md").read_text()
    for metric in (
        "agent/turns_mean",
        "agent/tool_errors_mean",
        "agent/forks_mean",
        "agent/failures",
        "agent/trained_share",
    ):
        assert metric in rows[0] and f"`{metric}`" in page
    assert len(_trajectories(run_dir)) == 16
    assert re.search(r"<h2 [^>]*>(Samples and t|T)rajectories</h2>", (run_dir / "report.html").read_text())


def test_a_missing_tool_ends_the_run_before_it_starts(tasks: Commands) -> None:
    """It is not trained without its agent."""
    _write_data(tasks.folder)
    files = ("data.train_files=[train.jsonl]", "data.val_files=[test.jsonl]", "run_dir=runs/refused")
    refused = tasks.run("train", "trainer=ppo", *files, *SMALL, "agent.loop=tool", "agent.tools={nothing: {}}")
    assert refused.code == 2
    assert "no plugin 'nothing' in rollcast.tools" in refused.text


def test_the_tool_of_the_first_page(tmp_path: Path) -> None:
    namespace: dict[str, object] = {}
    exec(titled_blocks("agents.md")["tools.py"], namespace)
    calculate = namespace["calculate"]
    assert callable(calculate)
    assert calculate("12 * (3 + 4)") == "84"
    with pytest.raises(ValueError, match="only numbers"):
        calculate("9**9**9")


def test_an_openai_agent_is_trained(tasks: Commands) -> None:
    pytest.importorskip("openai")
    (tasks.folder / "my_agent.py").write_text(titled_blocks("train-an-openai-agent.md")["my_agent.py"])
    run_dir = _train(tasks, "train-an-openai-agent.md")
    assert [row["agent/rollouts"] for row in read_metrics(run_dir)[1:]] == [16]
    trajectories = _trajectories(run_dir)
    assert {each["failure"] for each in trajectories} == {None}
    assert max(each["metrics"]["turns"] for each in trajectories) == 2


def test_a_command_is_trained(tasks: Commands) -> None:
    pytest.importorskip("openai")
    (tasks.folder / "solve.py").write_text(titled_blocks("train-an-openai-agent.md")["solve.py"])
    _write_data(tasks.folder)
    *_, command = titled_blocks("train-an-openai-agent.md")["train.sh"].replace("\\\n", " ").splitlines()
    _, *arguments = shlex.split(command)
    program = ("agent.program_kind=command", f"agent.program={sys.executable} solve.py")
    tasks.must_run(*arguments, *SMALL, *program, "rollout.n=2", "data.train_batch_size=2")
    trajectories = _trajectories(tasks.folder / "runs/program")
    assert [each["failure"] for each in trajectories] == [None] * 4
    assert all(each["reward"] is not None for each in trajectories)


def test_the_accounting_of_the_page_holds() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "agent-tokens.md").read_text("utf-8"), re.DOTALL)
    assert len(blocks) == 3
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "agent-tokens.md", "exec"), namespace)


def test_the_picture_is_there() -> None:
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", (DOCS / "agent-tokens.md").read_text("utf-8"))
    assert pictures and all((DOCS / each).is_file() for each in pictures)
