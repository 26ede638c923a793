"""docs/tutorial.md: its commands run one after the other, with few steps, on a cluster of two nodes at the end."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from page_packages import titled_blocks
from run_commands import Commands, read_metrics

from rollcast_testing.new import create_package

pytestmark = pytest.mark.long

BLOCKS = titled_blocks("tutorial.md")
#: Fewer and smaller steps than the page's; the warm-up, whose length no override reaches, is left out.
FEW = (
    *("trainer.total_steps=1", "trainer.save_freq=-1", "trainer.export=true", "data.train_batch_size=8"),
    *("data.val_max_samples=8", "actor.ppo_mini_batch_size=4", "rollout.n=4"),
)
UNTRAINED = ("trainer.warm_start=null", "model.random_init=true")
START = "runs/first/warm_start/export"


@pytest.fixture(scope="module")
def tutorial(tmp_path_factory: pytest.TempPathFactory) -> Commands:
    """The folder of the reader: the page's files, and the first run."""
    commands = Commands(tmp_path_factory.mktemp("tutorial"))
    for file, text in BLOCKS.items():
        if file.endswith(".py") and "/" not in file:
            (commands.folder / file).write_text(text)
    follow(commands, "first.sh", *FEW, *UNTRAINED, "runtime=local")
    exported = commands.folder / START
    exported.parent.mkdir(parents=True)
    (commands.folder / "runs/first/export").rename(exported)
    return commands


def follow(commands: Commands, script: str, *changes: str) -> None:
    """Run the commands of rollcast in a block; ``changes`` go to those that train."""
    for line in BLOCKS[script].replace("\\\n", " ").splitlines():
        program, *arguments = shlex.split(line)
        if program == "rollcast":
            commands.must_run(*arguments, *(changes if arguments[0] == "train" else ()))


def test_the_first_run(tutorial: Commands) -> None:
    assert [row["step"] for row in read_metrics(tutorial.folder / "runs/first")] == [0, 1]
    assert (tutorial.folder / "runs/first/report.html").is_file()


def test_an_own_reward(tutorial: Commands) -> None:
    follow(tutorial, "digits.sh", *FEW, "runtime=local", "trainer.export=false")
    row = read_metrics(tutorial.folder / "runs/digits")[-1]
    assert row["reward/errors"] == 0
    namespace: dict[str, object] = {}
    exec(BLOCKS["digits.py"], namespace)
    digits = namespace["digits"]
    from rollcast.contracts.reward import RewardSample

    assert digits(RewardSample("31=", "14", ground_truth="13")) == {"score": 0.5, "acc": False}  # type: ignore[operator]


def test_an_own_estimator(tutorial: Commands) -> None:
    package = create_package("advantage", "centred", tutorial.folder)
    (shown,) = (file for file in BLOCKS if file.startswith("rollcast-centred/"))
    source = (tutorial.folder / shown).read_text()
    assert source == BLOCKS[shown], "the page shows the template"
    points = "[rollcast.advantages]\ncentred = rollcast_centred:centred\n"
    tutorial.install(package.name, "rollcast_centred", source, points)
    follow(tutorial, "centred.sh", *FEW, "runtime=local", "trainer.export=false")
    assert read_metrics(tutorial.folder / "runs/centred")[-1]["step"] == 1


def test_an_agent(tutorial: Commands) -> None:
    small = ("agent.save_trajectories=1", "data.val_files=[]")
    follow(tutorial, "agent.sh", *FEW, *UNTRAINED, *small, "runtime=local", "trainer.export=false")
    (file,) = (tutorial.folder / "runs/agent/trajectories").glob("*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) == 32
    assert all(row["failure"] is None for row in rows)
    namespace: dict[str, object] = {}
    exec(BLOCKS["tools.py"], namespace)
    assert [namespace["calculator"](text) for text in ("12*34", "5-7", "1+2")] == ["408", "-2", "3"]  # type: ignore[operator]


@pytest.fixture
def cluster() -> Iterator[str]:
    """The page's cluster, at a free port."""
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    nodes.add_node(num_cpus=2)
    yield str(nodes.address)
    nodes.shutdown()


@pytest.mark.exhaustive
def test_a_cluster_of_two_nodes(tutorial: Commands, cluster: str) -> None:
    # The nodes are started in the folder of the tests, not in the reader's.
    start = f"model.path={tutorial.folder / START}"
    follow(
        tutorial, "cluster.sh", *FEW, start, f"runtime.address={cluster}", "trainer.export=false", "data.val_files=[]"
    )
    config = (tutorial.folder / "runs/cluster/config.yaml").read_text()
    assert "nnodes: 2" in config
    assert [row["step"] for row in read_metrics(tutorial.folder / "runs/cluster")] == [1]


def test_rays_options_are_those_of_ray() -> None:
    """The page starts its nodes by hand; here only that ray knows the options."""
    ray = Path(sys.executable).with_name("ray")
    shown = subprocess.run([str(ray), "start", "--help"], capture_output=True, text=True, check=True).stdout
    options = {word for word in shlex.split(BLOCKS["start.sh"]) if word.startswith("--")}
    assert all(option.partition("=")[0] in shown for option in options)
