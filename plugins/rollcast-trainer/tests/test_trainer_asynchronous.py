"""Training beside generation: groups of rollouts that start before the step that trains them."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from trainer_tools import SmallTask, before_stage, launch, read_metrics

from rollcast.config import compose
from rollcast.errors import CapabilityError, ConfigError, PluginNotFoundError
from rollcast.protocol import DataProto, Jagged
from rollcast_hf.rollout import HfRollout
from rollcast_serving.manager import ServerManager, Stragglers
from rollcast_trainer.batch.groups import first_rows
from rollcast_trainer.ppo import PpoTrainer
from rollcast_trainer.run.background_rollouts import age_metrics
from rollcast_trainer.run.data import train_batches
from rollcast_trainer.run.run import Run
from rollcast_trainer.run.settings import RunSettings, check_run
from rollcast_trainer.stages.policy_gap import precision_differs

pytestmark = pytest.mark.long

BESIDE = ["rollout.mode=colocated", "rollout.weight_sync=shared_memory", "rollout.replica.env={OMP_NUM_THREADS: '1'}"]


@pytest.mark.cases(1)
@pytest.mark.parametrize("policy", ["continue", "interrupt"])
def test_a_run_generates_ahead_within_the_bound(small_task: SmallTask, tmp_path: Path, policy: str) -> None:
    changes = ["trainer.max_staleness=1", "trainer.total_steps=4", f"rollout.update_in_flight={policy}"]
    launch(small_task.ppo(tmp_path, *BESIDE, *changes))
    rows = [row for row in read_metrics(tmp_path) if "reward/mean" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    ages = [row["staleness/max"] for row in rows]
    assert ages[0] == 0
    assert 1 <= max(ages) <= 2  # a window of two groups: one may overtake another
    for row in rows:
        shares = [value for key, value in row.items() if key.removeprefix("staleness/").isdigit()]
        assert sum(shares) == pytest.approx(1.0)
        assert row["rollout/groups_dropped"] == 0
        assert row["rollout/tokens"] > 0
        assert "rollout_corr/rollout_is_mean" in row  # the correction is on by itself
    assert rows[-1]["rollout/groups_waiting"] == rows[-1]["rollout/groups_running"] == 0


@pytest.mark.exhaustive
def test_stragglers_are_for_training_at_replicas(
    small_task: SmallTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, Stragglers | None]] = []
    whole = ServerManager.generate_many

    async def generate_many(self: ServerManager, requests: Any, progress: Any = None, stragglers: Any = None) -> Any:
        asked.append((len(requests), stragglers))
        return await whole(self, requests, progress, stragglers)

    monkeypatch.setattr(ServerManager, "generate_many", generate_many)
    keys = ["rollout.stragglers={share: 0.25, grace_s: 7}", "trainer.total_steps=1"]
    launch(small_task.ppo(tmp_path / "turns", *BESIDE, *keys))
    launch(small_task.ppo(tmp_path / "ahead", *BESIDE, *keys, "trainer.max_staleness=1"))
    cut = Stragglers(0.25, 7.0)
    # A step's responses together, a prompt's by themselves, and validations whole; 0 are those asked again.
    assert {each for each in asked if each[0]} == {(16, cut), (4, cut), (5, None)}
    with pytest.raises(CapabilityError, match=r"rollout\.stragglers\.share=0\.25 cuts responses at replicas"):
        launch(small_task.ppo(tmp_path / "none", *keys))


@pytest.mark.exhaustive
def test_a_resumed_run_trains_every_prompt_once(small_task: SmallTask, tmp_path: Path) -> None:
    """Groups under way when the checkpoint was written are generated again, and those that were trained are not."""
    changes = [*BESIDE, "trainer.max_staleness=2", "trainer.save_freq=1", "data.val_files=[]"]
    before, after = Seen(), Seen()
    train(small_task.ppo(tmp_path, *changes, "trainer.total_steps=4"), before)
    state = json.loads((tmp_path / "checkpoints" / "step_2" / "trainer.json").read_text())["stages"]["rollout"]
    assert state["position"] is not None
    for step in (3, 4):
        shutil.rmtree(tmp_path / "checkpoints" / f"step_{step}")
    settings = train(small_task.ppo(tmp_path, *changes, "trainer.total_steps=7"), after)
    assert [row["step"] for row in read_metrics(tmp_path)] == list(range(1, 8))
    batches = train_batches(settings)
    expected = [prompt for _ in range(7) for prompt in prompts_of(next(batches))]
    assert Counter(before.prompts[: 2 * 4] + after.prompts) == Counter(expected)


class Seen:
    """Prompts that reached the reward, each once a group."""

    def __init__(self) -> None:
        self.prompts: list[str] = []

    def __call__(self, batch: DataProto) -> None:
        self.prompts += prompts_of(batch.select_idxs(first_rows(batch)[0]))


def prompts_of(batch: DataProto) -> list[str]:
    return [str(prompt) for prompt in batch.non_tensor_batch["raw_prompt"]]


def train(overrides: list[str], seen: Seen) -> RunSettings:
    run = Run(check_run(compose(overrides).config, PpoTrainer))
    trainer = PpoTrainer(run)
    before_stage(trainer, "reward", seen)
    with run:
        trainer.fit()
    return run.settings


def test_ages_are_those_of_the_oldest_tokens_of_rows_that_train() -> None:
    mask = Jagged.from_lengths(torch.tensor([True] * 6 + [False] * 2), torch.tensor([1, 2, 3, 2]))
    batch = DataProto.from_dict(
        {
            "response_mask": mask.column(),
            "rollout_weight_version_min": torch.tensor([7, 6, 4, -1]),  # nothing was sampled in the last row
            "rollout_weight_version": torch.tensor([7, 7, 4, -1]),
        }
    )
    found = age_metrics(batch, version=7)
    assert [found[f"staleness/{age}"] for age in range(4)] == pytest.approx([1 / 6, 2 / 6, 0, 3 / 6])
    assert found["staleness/mean"] == pytest.approx((0 + 2 * 1 + 3 * 3) / 6)
    assert found["staleness/max"] == 3
    assert found["staleness/mixed_rows"] == pytest.approx(1 / 3)
    assert "staleness/4" not in found


@pytest.mark.exhaustive
def test_a_filter_asks_for_further_groups(small_task: SmallTask, tmp_path: Path) -> None:
    filters = ["algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=accuracy"]
    launch(small_task.ppo(tmp_path, *BESIDE, "trainer.max_staleness=1", *filters, "rollout.n=2"))
    rows = [row for row in read_metrics(tmp_path) if "reward/mean" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert max(row["rollout/gen_batches"] for row in rows) > 1


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (["trainer.max_staleness=1"], CapabilityError, r"trainer\.max_staleness=1 .*rollout\.mode=hybrid.*standalone"),
        ([*BESIDE, "trainer.max_staleness=1", "trainer.admission=fifo"], PluginNotFoundError, r"windowed_fifo"),
        (["trainer.max_staleness=-1"], ConfigError, r"trainer\.max_staleness"),
    ],
)
def test_what_cannot_work_is_refused_at_once(
    small_task: SmallTask, tmp_path: Path, changes: list[str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        launch(small_task.ppo(tmp_path, *changes))


def test_tokens_that_may_be_older_are_corrected_by_default(small_task: SmallTask, tmp_path: Path) -> None:
    def columns(*changes: str) -> frozenset[str]:
        config = compose(small_task.ppo(tmp_path, *BESIDE, *changes)).config
        return check_run(config, PpoTrainer).columns_read

    weights = "rollout_is_weights"
    assert weights not in columns()
    assert weights in columns("trainer.max_staleness=1")
    assert weights not in columns("trainer.max_staleness=1", "algorithm.rollout_correction.rollout_is=null")
    assert weights not in columns("trainer.max_staleness=1", "algorithm.rollout_correction.bypass_mode=true")


@pytest.mark.parametrize(
    ("keys", "differs"),
    [
        ({"dtype": "bfloat16"}, True),
        ({"dtype": "float32"}, False),
        ({"dtype": "auto"}, False),  # only the engine knows
        ({}, False),
        ({"dtype": "float32", "engine_kwargs": {"quantization": "fp8"}}, True),
    ],
)
def test_another_precision_is_read_from_the_configuration(
    small_task: SmallTask, tmp_path: Path, keys: dict[str, Any], differs: bool
) -> None:
    settings = check_run(compose(small_task.ppo(tmp_path, *BESIDE)).config, PpoTrainer)
    dtype = keys.get("dtype", "bfloat16")  # without the key, that of the model's folder
    beside = SimpleNamespace(
        uses_replicas=True,
        rollout=SimpleNamespace(quantization=None, **keys),
        rollout_dtype=None if dtype == "auto" else dtype,
        engine_class=settings.engine_class,
        engine=settings.engine,
    )
    assert precision_differs(cast(RunSettings, beside)) is differs
    beside.uses_replicas = False  # the rollout uses the actor's module
    assert not precision_differs(cast(RunSettings, beside))


def test_stages_do_not_depend_on_files_that_a_run_makes(small_task: SmallTask, tmp_path: Path) -> None:
    missing = str(tmp_path / "not-yet-there")
    config = compose([*small_task.ppo(tmp_path, *BESIDE), f"model.path={missing}"]).config
    assert "update_actor" in [place.name for place in check_run(config, PpoTrainer).places]


def test_eight_bit_weights_are_corrected_by_default(
    small_task: SmallTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = compose(small_task.ppo(tmp_path, *BESIDE, "rollout.quantization=fp8")).config
    with pytest.raises(CapabilityError, match=r"rollout\.quantization is fp8, but rollout\.name=hf cannot round"):
        check_run(config, PpoTrainer)
    able = replace(HfRollout.capabilities, quantization=frozenset({"fp8"}))
    monkeypatch.setattr(HfRollout, "capabilities", able)
    settings = check_run(config, PpoTrainer)
    assert "rollout_is_weights" in settings.columns_read
    assert settings.rollout_dtype == settings.engine_class.compute_dtype(
        settings.engine
    )  # the quantization alone differs
