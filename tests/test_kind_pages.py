"""The pages with a plugin of each kind: their code is installed as it stands there, checked, tested and used."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from page_packages import DOCS, titled_blocks
from run_commands import SMALL, Commands, read_metrics
from suite_tables import MODULES

from rollcast.plugins.discovery import describe_groups
from rollcast_testing.new import create_package
from rollcast_testing.tiny import tiny_model_folder

pytestmark = pytest.mark.long

PAGES = (
    "hooks.md",
    "write-a-command.md",
    "write-a-dataset.md",
    "write-a-device.md",
    "write-a-planner.md",
    "write-a-preprocessor.md",
    "write-a-runtime.md",
    "write-a-trainer.md",
    "write-a-weight-sync.md",
    "write-an-admission.md",
    "write-an-aggregation.md",
    "write-an-optimizer.md",
)
_TOML = re.compile(r"^```toml\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: One step on a few rows, by this process alone.
ONE = (*SMALL, "runtime=local", "trainer.total_steps=1", "trainer.save_freq=-1", "data.val_files=[]")


def entry_points(page: str) -> str:
    """The entry points that a page announces, in the format of an installed distribution."""
    found = "\n".join(_TOML.findall((DOCS / page).read_text()))
    return re.sub(r'\[project\.entry-points\."(.+)"\]', r"[\1]", found).replace('"', "")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Commands:
    """One distribution per page; test modules lie beside them."""
    commands = Commands(tmp_path_factory.mktemp("kinds"))
    for page in PAGES:
        blocks = titled_blocks(page)
        name = f"rollcast-page-{page.removesuffix('.md')}"
        commands.install(name, f"page_{page.removesuffix('.md').replace('-', '_')}", "", entry_points(page))
        for file, text in blocks.items():
            inside = not file.startswith(("tests/", "test_", "use_"))
            target = (commands.site if inside else commands.folder) / file.removeprefix("src/")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
    conf = commands.site / "rollcast_turns_conf"
    (conf / "runtime").mkdir(parents=True)
    (conf / "runtime" / "turns.yaml").write_text("# @package runtime\nname: turns\n")
    schemas = 'SCHEMAS = (ConfigSchema(path="runtime", schema=TurnsConfig, group="runtime", option="turns"),)\n'
    assert schemas.strip() in (DOCS / "write-a-runtime.md").read_text().replace("\n", " ")
    imports = "from rollcast.contracts.config import ConfigSchema\nfrom rollcast_turns import TurnsConfig\n"
    (conf / "__init__.py").write_text(imports + schemas)
    tiny_model_folder(commands.folder / "models" / "tiny", hidden=32)
    return commands


def run_python(commands: Commands, *arguments: str) -> str:
    environment = {**os.environ, **commands.environment()}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=commands.folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-3000:]
    return done.stdout


def test_every_plugin_is_sound(installed: Commands) -> None:
    listed = json.loads(installed.must_run("plugins", "--json", "--check").out)
    parts = listed["parts"] if isinstance(listed, dict) else listed
    ours = {
        f"{part['group']}:{part['name']}": part["state"] for part in parts if "rollcast-page" in part["distribution"]
    }
    assert len(ours) == 16
    assert set(ours.values()) == {"ok"}, ours


def test_their_tests_pass(installed: Commands) -> None:
    out = run_python(installed, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rA", ".")
    for file, count in (
        *(("test_lockstep", 3), ("test_onepool", 3), ("test_tabs", 2), ("test_nadam", 3)),
        *(("test_reverse", 2), ("test_torchfile", 3), ("test_losses", 8)),
    ):
        assert len(re.findall(rf"^PASSED \S*{file}\.py::", out, re.MULTILINE)) >= count, out


def test_optimizer_aggregation_penalties_and_hook_in_a_run(installed: Commands) -> None:
    plugins = ("actor.optim.optimizer=nadam", "actor.optim.optimizer_kwargs.momentum_decay=0.01")
    losses = ("actor.loss_agg_mode=capped_mean", "actor.use_kl_loss=true", "actor.kl_loss_type=huber")
    rewards = ("algorithm.use_kl_in_reward=true", "algorithm.kl_penalty=k1", "algorithm.kl_controller=decay")
    installed.must_run("train", *ONE, *plugins, *losses, *rewards, "run_dir=runs/losses", "trainer.total_steps=2")
    first, second = read_metrics(installed.folder / "runs/losses")
    assert second["actor/kl_loss"] > 0
    assert second["actor/kl_coef"] == pytest.approx(0.99 * first["actor/kl_coef"])
    assert not (installed.folder / "runs/losses/alarms.txt").exists()
    shown = installed.must_run("tail", "runs/losses", "-n", "1").out
    assert shown.startswith("step 2: 0.")
    missing = installed.run("tail", "runs/nothing")
    assert (missing.code, "is no run directory" in missing.text) == (2, True)


def test_the_listener_raises_its_alarm(installed: Commands) -> None:
    script = (
        "from types import SimpleNamespace as N\n"
        "from rollcast.contracts.hooks import build_hook_manager\n"
        "manager = build_hook_manager()\n"
        "manager.hook.on_configure(config=N(run_dir='.'))\n"
        "manager.hook.on_step_end(trainer=None, step=7, metrics={'actor/entropy': 0.01})\n"
    )
    environment = ("-c", script.replace("build_hook_manager()", "build_hook_manager(without=['profiling'])"))
    run_python(installed, *environment)
    assert (installed.folder / "alarms.txt").read_text() == "step 7: entropy 0.010\n"


def test_the_trainers_train(installed: Commands) -> None:
    installed.must_run("train", *ONE, "trainer.name=bestof", "run_dir=runs/bestof")
    (row,) = read_metrics(installed.folder / "runs/bestof")
    assert row["bestof/score"] >= row["reward/mean"]
    assert row["sft/loss"] > 0
    counted = installed.must_run(
        "train", "recipe=quickstart", "trainer.name=counter", "runtime=local", "trainer_kwargs.steps=5"
    )
    assert "trained to step 5" in counted.text


@pytest.mark.exhaustive
def test_the_weight_sync_carries_weights_to_a_replica(installed: Commands) -> None:
    replica = ("rollout.mode=colocated", "rollout.weight_sync=torch_file", "rollout.replica.env={OMP_NUM_THREADS: '1'}")
    installed.must_run("train", *ONE, *replica, "run_dir=runs/sync")
    (row,) = read_metrics(installed.folder / "runs/sync")
    assert row["sync/canary_gap"] < 1e-4
    assert row["rollout/logprob_gap_max"] < 1e-3


@pytest.mark.exhaustive
def test_preprocessor_and_dataset_feed_a_run(installed: Commands) -> None:
    files = ("data.train_files=[data/reverse/train.jsonl]", "data.val_files=[data/reverse/test.jsonl]")
    made = ("data.preprocess=reverse", "data.preprocess_dir=data/reverse", "model.path=models/tiny")
    installed.must_run("train", *ONE, *made, *files, "run_dir=runs/reverse")
    again = installed.must_run("preprocess", "reverse", "--output", "again", "--seed", "0")
    assert "train.jsonl" in again.text
    for name in ("train.jsonl", "test.jsonl"):
        assert (installed.folder / "again" / name).read_text() == (installed.folder / "data/reverse" / name).read_text()
    (installed.folder / "train.tsv").write_text("".join(f"{n}+1=\t{n + 1}\n" for n in range(20)))
    rows = ("data.dataset=tabs", "data.train_files=[train.tsv]", "model.path=models/tiny", "data.preprocess=null")
    installed.must_run("train", *ONE, *rows, "run_dir=runs/tabs")
    assert [row["step"] for row in read_metrics(installed.folder / "runs/tabs")] == [1]


def test_the_runtime_hosts_several_ranks(installed: Commands) -> None:
    page = (DOCS / "write-a-runtime.md").read_text()
    assert run_python(installed, "use_turns.py") == re.search(r"```text\n(.+?)```", page, re.DOTALL)[1]
    composed = json.loads(installed.must_run("config", "--json", "runtime=turns", "trainer=ppo", "model.path=x").out)
    assert "turns" in json.dumps(composed)


def test_the_device_is_registered(installed: Commands) -> None:
    script = "from rollcast.contracts.device import find_device; print(find_device('mlu').collective)"
    assert run_python(installed, "-c", script) == "cncl\n"


def test_the_dataset_is_the_template(tmp_path: Path) -> None:
    package = create_package("dataset", "tabs", tmp_path)
    (file,) = (file for file in titled_blocks("write-a-dataset.md") if file.startswith("src/"))
    assert (package / file).read_text() == titled_blocks("write-a-dataset.md")[file]


def test_every_group_has_a_row_and_every_row_a_group() -> None:
    page = (DOCS / "kinds-of-plugins.md").read_text()
    listed = set(re.findall(r"`(rollcast\.[a-z_]+)`", "\n".join(re.findall(r"^\| (`.+?) \|", page, re.MULTILINE))))
    assert listed == set(describe_groups())
    suites = set(re.findall(r"`(\w+Suite)`", page))
    shipped = {name for module in MODULES for name in dir(importlib.import_module(module))}
    assert suites <= shipped, suites - shipped
