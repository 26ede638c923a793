"""Training again from recorded rollouts, bit by bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from trainer_tools import SmallTask, launch, read_checkpoint, read_metrics, without_times

from rollcast.config import compose
from rollcast.errors import ConfigError
from rollcast.protocol import DataProto, Jagged
from rollcast_trainer.ppo import PpoTrainer
from rollcast_trainer.run.replay import RolloutRecord
from rollcast_trainer.run.run import Run
from rollcast_trainer.run.settings import check_run

pytestmark = pytest.mark.long

RECORD = "runtime.record_trajectories=true"
BESIDE = [
    "trainer.max_staleness=1",
    "rollout.mode=standalone",
    "rollout.weight_sync=shared_memory",
    "rollout.replica.env={OMP_NUM_THREADS: '1'}",
    "placement.pools={rollouts: [1]}",
    "placement.mapping={rollout: rollouts}",
]
#: Rows of groups in which scores do not differ have a part in this update too, through the entropy.
RUN = ["trainer.total_steps=4", "trainer.save_freq=2", "actor.entropy_coeff=0.01", "actor.ppo_epochs=2"]
KINDS = {
    "synchronous": [],
    "ahead": BESIDE,
    "filtered": [
        *("algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=accuracy"),
        *("actor.use_kl_loss=true", "algorithm.adv_estimator=gae"),
    ],
}


def training_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Metrics of training, without those of weight syncs and validations, which a replay has not."""
    rows = [row for row in without_times(read_metrics(run_dir)) if row["step"]]
    left_out = ("val/", "sync/", "rollout/weight_version")
    return [{key: value for key, value in row.items() if not key.startswith(left_out)} for row in rows]


def saved_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, weights and optimizer, by name."""
    shards = folder / "shards"
    about = dcp.FileSystemReader(shards).read_metadata().state_dict_metadata
    sizes = {name: (each.size, each.properties.dtype) for name, each in about.items() if hasattr(each, "size")}
    found = {name: torch.empty(size, dtype=dtype) for name, (size, dtype) in sorted(sizes.items())}
    dcp.load(dict(found), checkpoint_id=shards, no_dist=True)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.cases(2)
def test_a_replay_repeats_training_bit_by_bit(small_task: SmallTask, tmp_path: Path, kind: str) -> None:
    recorded, replayed = tmp_path / "recorded", tmp_path / "replayed"
    changes = [*RUN, *KINDS[kind]]
    launch(small_task.ppo(recorded, *changes, RECORD))
    launch(small_task.ppo(replayed, *changes, f"trainer.replay={recorded}"))
    assert training_metrics(replayed) == training_metrics(recorded)
    roles = ["actor", *(["critic"] if kind == "filtered" else [])]
    for folder in (f"step_{step}/{role}" for step in (2, 4) for role in roles):
        before, after = (saved_tensors(run / "checkpoints" / folder) for run in (recorded, replayed))
        assert {name.partition(".")[0] for name in before} >= {"model", "optim"}
        assert list(before) == list(after)
        assert [name for name in before if not torch.equal(before[name], after[name])] == []
    early, late = (read_checkpoint(replayed / "checkpoints" / f"step_{step}" / "actor") for step in (2, 4))
    assert any(not torch.equal(early[name], late[name]) for name in early)  # it trained


@pytest.fixture(scope="module")
def recorded(small_task: SmallTask, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded") / "run"
    launch(small_task.ppo(folder, RECORD, *RUN))
    return folder


def test_a_replay_needs_no_rollout_and_no_reward(small_task: SmallTask, tmp_path: Path, recorded: Path) -> None:
    config = compose(small_task.ppo(tmp_path, *RUN, f"trainer.replay={recorded}")).config
    trainer = PpoTrainer(Run(check_run(config, PpoTrainer)))
    names = [place.name for place in trainer.run.settings.places]
    assert names[0] == "replay" and not {"rollout", "reward"} & set(names)
    with trainer.run:
        trainer.fit()
        worker = trainer.run.actor.group.workers[0].handle.workers[trainer.run.actor.group.role]
        assert worker.rollout is None and worker.weight_sync is None
        with pytest.raises(RuntimeError, match="replays recorded rollouts"):
            _ = trainer.run.scorer


def test_a_resumed_replay_and_a_resumed_record_are_those_of_one_run(
    small_task: SmallTask, tmp_path: Path, recorded: Path
) -> None:
    """The later steps of both are made anew."""
    again, replayed = tmp_path / "again", tmp_path / "replayed"
    shutil.copytree(recorded, again)
    shutil.rmtree(again / "checkpoints" / "step_4")
    (again / "rollouts" / "step_9.batch").write_bytes(b"of a run that went further")
    launch(small_task.ppo(again, RECORD, *RUN))
    assert RolloutRecord(again).steps() == [1, 2, 3, 4]
    for step in RolloutRecord(again).steps():
        before, after = (RolloutRecord(run).read(step) for run in (recorded, again))
        assert before[0].equal(after[0]) and before[1] == after[1]
    launch(small_task.ppo(replayed, *RUN, f"trainer.replay={again}"))
    shutil.rmtree(replayed / "checkpoints" / "step_4")
    launch(small_task.ppo(replayed, *RUN, f"trainer.replay={again}"))
    before, after = (read_checkpoint(run / "checkpoints" / "step_4" / "actor") for run in (recorded, replayed))
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_record_has_what_training_reads_and_no_pickle(recorded: Path) -> None:
    batch, metrics = RolloutRecord(recorded).read(2)
    assert {"prompts", "responses", "response_mask", "rollout_log_probs", "uid", "token_level_scores"} <= set(
        batch.keys()
    )
    assert {"rollout_weight_version", "rollout_weight_version_min"} <= set(batch.keys())
    assert metrics["reward/mean"] == read_metrics(recorded)[2]["reward/mean"]
    file = recorded / "rollouts" / "step_2.batch"
    tokens = len(Jagged.of(batch["responses"]).values) + len(Jagged.of(batch["prompts"]).values)
    assert file.stat().st_size <= 4096 + 128 * len(batch) + 24 * tokens  # as the documentation says
    assert DataProto.load(file).equal(DataProto.load(file))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["actor.optim.lr=1e-3"], r"other settings \(actor\.optim\.lr: 0\.01 then, 0\.001 now\)"),
        (["rollout.n=2"], r"other settings \(.*rollout\.n: 4 then, 2 now"),
        (["trainer.total_steps=6"], r"has steps 1 to 4, but this run trains steps 1 to 6, and step 5 is not recorded"),
    ],
)
def test_a_record_that_does_not_fit_is_refused(
    small_task: SmallTask, tmp_path: Path, recorded: Path, changes: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        launch(small_task.ppo(tmp_path, *RUN, *changes, f"trainer.replay={recorded}"))


@pytest.mark.parametrize("part", ["tokenizer", "model"])
def test_another_tokenizer_or_model_is_refused(
    small_task: SmallTask, tmp_path: Path, recorded: Path, part: str
) -> None:
    changed = tmp_path / "changed"
    shutil.copytree(recorded, changed)
    index = json.loads((changed / "rollouts" / "index.json").read_text())
    assert set(index) == {"version", "tokenizer", "model"}
    (changed / "rollouts" / "index.json").write_text(json.dumps({**index, part: "of another"}))
    with pytest.raises(ConfigError, match=rf"recorded with another {part} than model\.path="):
        launch(small_task.ppo(tmp_path / "run", *RUN, f"trainer.replay={changed}"))


def test_other_weights_have_another_fingerprint(small_task: SmallTask, tmp_path: Path, recorded: Path) -> None:
    from safetensors.torch import load_file, save_file

    from rollcast_trainer.run.replay import fingerprints

    model = tmp_path / "model"
    shutil.copytree(small_task.model, model)
    (weights,) = model.glob("*.safetensors")
    tensors = load_file(weights)
    name = min(tensors)
    tensors[name] = tensors[name] + 1
    save_file(tensors, weights, metadata={"format": "pt"})
    config = compose([*small_task.ppo(tmp_path / "run"), f"model.path={model}"]).config
    own = json.loads((recorded / "rollouts" / "index.json").read_text())
    found = fingerprints(check_run(config))
    assert found["tokenizer"] == own["tokenizer"] and found["model"] != own["model"]


def test_a_run_without_a_record_and_a_damaged_one_are_refused(
    small_task: SmallTask, tmp_path: Path, recorded: Path
) -> None:
    with pytest.raises(ConfigError, match=r"holds no record of rollouts .*runtime\.record_trajectories=true"):
        launch(small_task.ppo(tmp_path / "run", f"trainer.replay={tmp_path}"))
    damaged = tmp_path / "damaged"
    shutil.copytree(recorded, damaged)
    file = damaged / "rollouts" / "step_1.batch"
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(ConfigError, match=r"step 1 cannot be read: .*step_1\.batch"):
        launch(small_task.ppo(tmp_path / "other", *RUN, f"trainer.replay={damaged}"))


def test_a_run_without_rollouts_records_none(small_task: SmallTask, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"runtime\.record_trajectories records rollouts, but trainer=sft makes none"):
        launch(small_task.sft(tmp_path, RECORD))
