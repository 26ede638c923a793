"""What each command prints and writes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]
HEAVY = "torch", "tensordict", "ray", "transformers"


def test_help_lists_the_commands(run: Run) -> None:
    done = run("--help")
    assert done.code == 0
    for command in ("train", "plugins", "config", "version"):
        assert re.search(rf"^\W*{command}\s", done.out, re.MULTILINE), command


@pytest.mark.parametrize("command", ["train", "plugins", "config", "version"])
def test_help_of_a_command(run: Run, command: str) -> None:
    done = run(command, "--help")
    assert done.code == 0
    assert f"rollcast {command}" in done.out
    assert "--traceback" in done.out


@pytest.mark.parametrize(
    "arguments", [["--help"], ["plugins"], ["plugins", "--json"], ["version"], ["train", "--help"]]
)
def test_nothing_heavy_is_imported(run_apart: Run, cli_plugin: Path, arguments: list[str]) -> None:
    code = (
        "import sys\n"
        "from rollcast.cli.app import main\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    code = end.code\n"
        f"found = [name for name in sys.modules if name in {HEAVY!r} or name.startswith('tp_')]\n"
        "sys.exit(f'imported {found}' if found else code)\n"
    )
    done = run_apart(*arguments, python=("-c", code))
    assert done.code == 0, done.err
    assert done.out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["plugns"], "plugns"),
        (["train", "--nope"], "--nope"),
        (["config", "--jsn"], "--json"),
    ],
)
def test_mistakes_in_the_command_line(run: Run, arguments: list[str], says: str) -> None:
    done = run(*arguments)
    assert done.code == 2
    assert says in done.err
    assert not done.out


# -- train --------------------------------------------------------------------------------------


def test_train_launches_the_trainer(run: Run, cli_plugin: Path) -> None:
    done = run("train", "trainer=tp_cli", "runtime=local", "trainer.steps=2", "run_dir=runs/x")
    assert done.code == 0, done.err
    assert "trained to step 2; everything is in runs/x" in done.err
    assert Path("runs/x/checkpoints/step_2").is_dir()


def test_train_without_a_trainer_lists_what_can_be_chosen(run: Run, cli_plugin: Path, tmp_path: Path) -> None:
    (tmp_path / "my" / "recipe").mkdir(parents=True)
    (tmp_path / "my" / "recipe" / "of_my_own.yaml").write_text("run_dir: x\n")
    done = run("train", "--config-dir", str(tmp_path / "my"))
    assert done.code == 2
    assert re.search(r"^recipes: .*of_my_own", done.err, re.MULTILINE)
    assert re.search(r"^trainers: .*tp_cli", done.err, re.MULTILINE)


def test_train_loads_every_named_part_before_it_starts(
    run: Run, cli_plugin: Path, make_dist: Callable[..., Path]
) -> None:
    make_dist(
        "tp-half", {"rollcast.trackers": {"tp_half": "tp_half:T"}}, {"tp_half.py": "raise RuntimeError('half built')"}
    )
    done = run("train", "trainer=tp_cli", "runtime=local", "trainer.steps=1", "trackers=[tp_half]", "run_dir=runs/x")
    assert done.code == 2
    assert "half built" in done.err
    assert "trackers (override 'trackers=[tp_half]')" in done.err
    assert not Path("runs").exists()


# -- config -------------------------------------------------------------------------------------


def test_config_shows_value_and_origin(run: Run, cli_plugin: Path) -> None:
    done = run("config", "trainer=tp_cli", "trainer.steps=4", "run_dir='null'")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    shown = {line.split(" = ")[0].strip(): line.split(" = ", 1)[1] for line in lines}
    assert re.fullmatch(r"4 +# override 'trainer.steps=4'", shown["trainer.steps"])
    assert re.fullmatch(r"tp_cli +# tp-cli: trainer/tp_cli.yaml", shown["trainer.name"])
    assert re.fullmatch(r'"" +# tp-cli: trainer/tp_cli.yaml', shown["trainer.what"])
    assert shown["run_dir"].startswith('"null" ')
    assert re.fullmatch(r"ray +# rollcast-ray: runtime/ray.yaml", shown["runtime.name"])
    assert re.fullmatch(r"null +# default of rollcast_ray.schemas.RayRuntimeConfig", shown["runtime.address"])
    # Aligned: every equals sign and every origin stands in one column.
    assert len({line.index(" = ") for line in lines}) == 1
    assert len({line.index("  # ") for line in lines}) == 1


def test_config_as_json(run: Run, cli_plugin: Path) -> None:
    shown = json.loads(run("config", "trainer=tp_cli", "trackers=[jsonl]", "--json").out)
    assert shown["choices"]["trainer"] == "tp_cli"
    assert shown["keys"]["trackers"] == {
        "value": ["jsonl"],
        "origin": "override 'trackers=[jsonl]'",
        "doc": "Registry names of the trackers.",
    }
    assert shown["keys"]["runtime.num_cpus"] == {
        "value": None,
        "origin": "default of rollcast_ray.schemas.RayRuntimeConfig",
        "doc": "Logical CPUs of an embedded Ray; null for the number of cores, or of processes if there are more.",
    }


def test_config_shows_what_must_be_set(run: Run, cli_plugin: Path) -> None:
    (cli_plugin / "tp_cli_conf" / "trainer" / "tp_cli.yaml").write_text("# @package trainer\nname: tp_cli\nwhat: ???\n")
    done = run("config", "trainer=tp_cli")
    assert done.code == 0
    assert re.search(r"^trainer\.what += \?\?\? +# .*\(must be set\)$", done.out, re.MULTILINE)
    assert run("train", "trainer=tp_cli").code == 2


def test_config_refuses_like_train(run: Run, cli_plugin: Path) -> None:
    errors = {run(command, "trainer=tp_cli", "trainer.stesp=1").err for command in ("config", "train")}
    assert len(errors) == 1
    assert "'trainer.steps'" in errors.pop()


# -- explain ------------------------------------------------------------------------------------


def test_explain_a_key(run: Run, cli_plugin: Path) -> None:
    done = run("explain", "trainer.steps", "trainer=tp_cli", "trainer.steps=4")
    assert done.code == 0, done.err
    rows = dict(line.split(maxsplit=1) for line in done.out.splitlines()[1:])
    assert rows["takes"] == "an integer"
    assert rows["here"] == "4  (from override 'trainer.steps=4')"
    assert rows["declared"] == "in tp_cli_conf.Keys"


def test_explain_a_section(run: Run, cli_plugin: Path) -> None:
    keys = {line.split()[0] for line in run("explain", "runtime").out.splitlines()}
    assert {"runtime.name", "runtime.num_cpus"} <= keys
    assert all(key.startswith("runtime.") for key in keys)
    found = json.loads(run("explain", "runtime.num_cpus", "--json").out)
    assert found["runtime.num_cpus"]["origin"] == "default of rollcast_ray.schemas.RayRuntimeConfig"


def test_explain_names_the_nearest_key(run: Run, cli_plugin: Path) -> None:
    done = run("explain", "trainer.stesp", "trainer=tp_cli")
    assert done.code == 2
    assert "there is no key 'trainer.stesp'; did you mean 'trainer.steps'?" in done.err


# -- plugins ------------------------------------------------------------------------------------


@pytest.fixture
def broken(make_dist: Callable[..., Path]) -> Path:
    return make_dist(
        "tp-broken",
        {"rollcast.rewards": {"tp_broken": "tp_nowhere:reward", "tp_slow": "tp_slow:reward"}},
        {
            "tp_slow.py": "def fail():\n    raise RuntimeError('only when imported')\n\nreward = fail()\n",
        },
    )


def test_plugins_lists_plugins(run: Run, cli_plugin: Path) -> None:
    done = run("plugins")
    assert done.code == 0
    lines = done.out.splitlines()
    start = lines.index("rollcast.trainers  training loops")
    assert any(re.fullmatch(r"  tp_cli +tp-cli 3\.1 +ok", line) for line in lines[start:])
    assert "rollcast.engines  training engines: model, optimizer and their parallelism" in lines


@pytest.mark.parametrize("group", ["trainers", "rollcast.trainers"])
def test_plugins_of_one_group(run: Run, cli_plugin: Path, group: str) -> None:
    out = run("plugins", group).out
    assert "tp_cli" in out
    assert "rollcast.runtimes" not in out


def test_plugins_as_json(run: Run, cli_plugin: Path) -> None:
    rows = json.loads(run("plugins", "--json").out)
    mine = [row for row in rows if row["distribution"] == "tp-cli" and row["group"] == "rollcast.trainers"]
    assert mine == [
        {
            "group": "rollcast.trainers",
            "name": "tp_cli",
            "distribution": "tp-cli",
            "version": "3.1",
            "value": "tp_cli_code:Trainer",
            "state": "ok",
            "cause": "",
        }
    ]


def test_plugins_shows_the_cause_and_still_succeeds(run: Run, broken: Path) -> None:
    done = run("plugins", "rewards")
    assert done.code == 0
    assert re.search(r"^  tp_broken +tp-broken 1\.0 +broken$", done.out, re.MULTILINE)
    assert "tp_nowhere" in done.out
    assert re.search(r"^  tp_slow +tp-broken 1\.0 +ok$", done.out, re.MULTILINE)


def test_plugins_check_imports_and_fails(run: Run, broken: Path) -> None:
    done = run("plugins", "rewards", "--check", "--json")
    assert done.code == 1
    rows = {row["name"]: row for row in json.loads(done.out)}
    assert rows["tp_slow"]["state"] == "broken"
    assert "only when imported" in rows["tp_slow"]["cause"]


def test_plugins_check_knows_what_groups_hold(run: Run, make_dist: Callable[..., Path]) -> None:
    make_dist("tp-odd", {"rollcast.commands": {"tp_odd": "tp_odd:x"}}, {"tp_odd.py": "x = 3"})
    done = run("plugins", "commands", "--check")
    assert done.code == 1
    assert "neither a typer.Typer nor a click command" in done.out


def test_plugins_check_knows_groups_that_a_config_package_declares(run: Run, make_dist: Callable[..., Path]) -> None:
    contract = """
        from rollcast.plugins import Registry, is_callable

        SCHEMAS = ()
        bells = Registry("rollcast.tp_bells", is_callable(0), "tp_bell.name")
    """
    points = {"rollcast.configs": {"tp_bell": "tp_bell_conf", "tp_torn": "tp_bell_torn"}}
    files = {"tp_bell_conf/__init__.py": contract, "tp_bell_torn.py": "raise SystemExit(3)", "tp_ring.py": "bell = 3"}
    make_dist("tp-bell", {**points, "rollcast.tp_bells": {"ring": "tp_ring:bell"}}, files)
    done = run("plugins", "tp_bells", "--check")
    assert done.code == 1
    assert "an object of type int, which cannot be called" in " ".join(done.out.split())


def test_plugins_check_succeeds_where_all_is_sound(run: Run, cli_plugin: Path) -> None:
    done = run("plugins", "execute_modes", "--check")
    assert done.code == 0, done.all
    assert "rank_zero" in done.out


def test_plugins_unknown_group(run: Run) -> None:
    done = run("plugins", "engine")
    assert done.code == 2
    assert "did you mean 'engines'?" in done.err


# -- version ------------------------------------------------------------------------------------


def test_version_option(run: Run) -> None:
    done = run("--version")
    assert (done.code, done.out.strip()) == (0, f"rollcast {version('rollcast')}")


def test_version(run: Run, cli_plugin: Path) -> None:
    rows = dict(line.split(maxsplit=1) for line in run("version").out.splitlines())
    assert rows["rollcast"] == version("rollcast")
    assert rows["tp-cli"] == "3.1"
    assert rows["torch"] == version("torch")
    assert rows["ray"] == version("ray")
    assert {"python"} < rows.keys()
