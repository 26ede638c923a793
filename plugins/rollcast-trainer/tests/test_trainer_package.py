"""What the distribution shows to others: its names, its config, and the README's example."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from trainer_tools import SmallTask, launch, read_metrics, set_up, worker_of

from rollcast.config import compose
from rollcast.contracts.stage import stages
from rollcast.contracts.trainer import trainers
from rollcast_trainer import api

README = Path(__file__).parents[1] / "README.md"


def test_public_names_resolve() -> None:
    for name in api.__all__:
        assert getattr(api, name) is not None


def test_the_config_package_imports_nothing_heavy() -> None:
    code = (
        "import sys, rollcast_trainer, rollcast_trainer.conf, rollcast_trainer.schemas\n"
        "print([name for name in ('torch', 'tensordict', 'ray', 'transformers') if name in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_trainers_are_announced() -> None:
    assert {"ppo", "sft"} <= set(trainers.names())


def test_a_run_with_the_local_runtime_needs_no_ray(small_task: SmallTask, tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['ray'] = None\n"
        "from rollcast.cli.app import main\n"
        "try:\n    main()\n"
        "finally:\n    print(*sorted(name for name in sys.modules if name.startswith('rollcast_ray')))"
    )
    overrides = small_task.ppo(tmp_path, "trainer.total_steps=1", "trainer.test_freq=-1")
    shown = subprocess.run([sys.executable, "-c", code, "train", *overrides], capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    loaded = set(shown.stdout.splitlines()[-1].split())
    assert loaded <= {"rollcast_ray", "rollcast_ray.conf", "rollcast_ray.schemas"}
    assert read_metrics(tmp_path)[-1]["step"] == 1


@pytest.mark.parametrize("option", ["ppo", "sft"])
def test_defaults_are_those_of_the_schemas(option: str, tmp_path: Path) -> None:
    config: Any = compose([f"trainer={option}", f"model.path={tmp_path}"]).config
    defaults = trainers.get(option).schema()  # type: ignore[attr-defined]
    assert dict(config.trainer) == asdict(defaults.trainer)
    actor = {key: value for key, value in config.actor.items() if key != "engine"}
    assert {**actor, "engine": {}} == asdict(defaults.actor)


def test_the_critic_learns_faster_than_the_policy(tmp_path: Path) -> None:
    config: Any = compose(["trainer=ppo", f"model.path={tmp_path}"]).config
    assert (config.actor.optim.lr, config.critic.optim.lr) == (1e-6, 1e-5)


def test_the_stage_in_the_readme_works(small_task: SmallTask, tmp_path: Path) -> None:
    code = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert code is not None
    namespace: dict[str, Any] = {}
    exec(compile(code[1], "my_stages.py", "exec"), namespace)
    with stages.temporarily("finished_only", namespace["FinishedOnly"]):
        launch(small_task.ppo(tmp_path, "trainer.stages.insert=[finished_only]", "trainer.total_steps=1"))
    row = read_metrics(tmp_path)[-1]
    assert row["actor/cut_off_rows"] == 1 - row["rollout/finished"]
    assert row["actor/cut_off_rows"] > 0


def test_a_worker_without_a_reference_says_so(small_task: SmallTask, tmp_path: Path) -> None:
    from rollcast.errors import CapabilityError
    from rollcast_testing.tiny import random_batch

    with (
        set_up(small_task.ppo(tmp_path)) as trainer,
        pytest.raises(CapabilityError, match=r"actor\.use_kl_loss or algorithm\.use_kl_in_reward"),
    ):
        worker_of(trainer).compute_ref_log_prob(random_batch(2, 3, 3))


@pytest.mark.parametrize(("device", "hidden"), [("cpu", True), ("auto", False)])
def test_workers_on_the_cpu_see_no_accelerator(
    small_task: SmallTask, tmp_path: Path, device: str, hidden: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with set_up(small_task.ppo(tmp_path, f"placement.device={device}")):
        assert (os.environ["CUDA_VISIBLE_DEVICES"] == "") == hidden
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"
