"""Two sharded workers on Ray against one, and against plain PyTorch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from trainer_tools import SmallTask, before_stage, global_norm, launch, read_checkpoint, read_metrics, without_times

from rollcast.contracts.algorithm import AdvantageInputs, AdvantageOutputs, advantages
from rollcast.contracts.trainer import trainers
from rollcast.protocol import DataProto
from rollcast_testing.tiny import padded_batch, plain_log_probs, plain_model
from rollcast_trainer.ppo import PpoTrainer

pytestmark = pytest.mark.long

#: Greedy samples are the same on any number of workers. Three rows, so that one of two workers gets filler.
GREEDY = [
    "algorithm.adv_estimator=score_and_row",
    "trainer.name=recording",
    "rollout.temperature=0",
    "rollout.n=1",
    "data.train_batch_size=3",
    "actor.ppo_mini_batch_size=3",
    "actor.use_kl_loss=true",
    "actor.kl_loss_coef=0.1",
    "trainer.save_freq=1",
    "trainer.test_freq=1",
]
#: Rates, and a difference of nearly equal numbers.
NOT_EQUAL = {"rollout/tokens_per_s", "rollout/logprob_gap_max", "rollout/logprob_gap_mean"}
TWO = ["runtime=ray", "runtime.threads_per_worker=1", "placement.n_gpus_per_node=2"]


def score_and_row(inputs: AdvantageInputs) -> AdvantageOutputs:
    """The sum of a row's rewards and its number, so that no row is without one."""
    scores = inputs.token_level_rewards.sum(-1) + 0.5 * inputs.group_ids - 0.3
    return AdvantageOutputs.from_scores(scores, inputs.response_mask)


class Recording(PpoTrainer):
    """Keeps what it updates with."""

    batches_seen: list[DataProto]

    def setup(self) -> None:
        super().setup()
        before_stage(self, "update_actor", lambda batch: self.batches_seen.append(batch.local()))


@pytest.fixture(scope="module", autouse=True)
def parts() -> Iterator[None]:
    advantages.register("score_and_row", score_and_row)
    trainers.register("recording", Recording)
    yield
    advantages.unregister("score_and_row")
    trainers.unregister("recording")


@pytest.fixture(scope="module")
def one_worker(small_task: SmallTask, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[DataProto], Path]:
    return record(small_task, tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def two_workers(
    small_task: SmallTask, tmp_path_factory: pytest.TempPathFactory, ray_is_up: None
) -> tuple[list[DataProto], Path]:
    return record(small_task, tmp_path_factory.mktemp("two"), *TWO)


def record(task: SmallTask, run_dir: Path, *changes: str) -> tuple[list[DataProto], Path]:
    Recording.batches_seen = []
    launch(task.ppo(run_dir, *GREEDY, *changes, "trainer.total_steps=2"))
    return Recording.batches_seen, run_dir


Recorded = tuple[list[DataProto], Path]


def test_both_sample_the_same_tokens(one_worker: Recorded, two_workers: Recorded) -> None:
    one, two = (padded_batch(recorded[0][0]) for recorded in (one_worker, two_workers))
    for name in ("input_ids", "response_mask", "uid"):
        assert torch.equal(one[name], two[name])
    torch.testing.assert_close(one["advantages"], two["advantages"])


def test_gradient_norms_agree(one_worker: Recorded, two_workers: Recorded) -> None:
    ones, twos = (read_metrics(run_dir) for _, run_dir in (one_worker, two_workers))
    assert [row["step"] for row in twos] == [0, 1, 2]
    for one, two in zip(ones[1:], twos[1:], strict=True):
        assert two["actor/grad_norm"] == pytest.approx(one["actor/grad_norm"], rel=1e-5)
        for key in ("actor/pg_loss", "actor/entropy", "actor/kl_loss", "val/accuracy", "reward/mean"):
            assert two[key] == pytest.approx(one[key], rel=1e-4, abs=1e-6)
        assert two["rollout/logprob_gap_max"] <= 1e-4


def test_the_norm_is_that_of_a_plain_pytorch_step(small_task: SmallTask, two_workers: Recorded) -> None:
    """In the first step the policy is its own reference, so the policy loss is all there is."""
    (jagged, _), run_dir = two_workers
    batch = padded_batch(jagged)
    model = plain_model(small_task.model)
    log_probs, _ = plain_log_probs(model, batch)
    mask = batch["response_mask"]
    ratio = (log_probs - log_probs.detach()).exp()
    (-(batch["advantages"] * ratio * mask).sum() / mask.sum()).backward()
    norm = global_norm([parameter.grad for parameter in model.parameters()])
    assert norm > 1e-2
    assert read_metrics(run_dir)[1]["actor/grad_norm"] == pytest.approx(norm, rel=1e-5)


@pytest.mark.exhaustive
def test_balancing_the_ranks_changes_no_gradient(small_task: SmallTask, ray_is_up: None, tmp_path: Path) -> None:
    """Prompts of 3 to 16 tokens, with a reference and a critic, which get their rows in another order too."""
    ragged = tmp_path / "ragged.jsonl"
    rows = [{"prompt": "7+" * size + "=", "ground_truth": ""} for size in (7, 1, 6, 2)]
    ragged.write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = [
        f"data.train_files=[{ragged}]",
        "data.val_files=[]",
        "actor.use_kl_loss=true",
        "algorithm.adv_estimator=gae",
        "trainer.total_steps=2",
    ]
    changes += ["trainer.save_freq=-1", *TWO]
    launch(small_task.ppo(tmp_path / "plain", *changes, "trainer.balance_batch=false"))
    launch(small_task.ppo(tmp_path / "balanced", *changes))
    plain, balanced = (read_metrics(tmp_path / name) for name in ("plain", "balanced"))
    assert [row["step"] for row in balanced] == [1, 2]
    for expected, row in zip(plain, balanced, strict=True):
        assert not any(key.startswith("global_seqlen/") for key in expected)
        assert row["global_seqlen/balanced_max"] - row["global_seqlen/balanced_min"] <= 3
        for key in ("actor/grad_norm", "critic/grad_norm", "actor/pg_loss", "actor/kl_loss", "actor/entropy"):
            assert row[key] == pytest.approx(expected[key], rel=1e-5, abs=1e-6), key
    assert max(row["global_seqlen/minmax_diff"] for row in balanced) > 3


def test_two_workers_go_on_from_a_checkpoint(small_task: SmallTask, two_workers: Recorded, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(two_workers[1], run_dir)
    shutil.rmtree(run_dir / "checkpoints" / "step_2")
    names = {path.name for path in (run_dir / "checkpoints" / "step_1").iterdir()}
    assert names == {"actor", "rollout_rank_0.pt", "rollout_rank_1.pt", "trainer.json"}
    launch(small_task.ppo(run_dir, *GREEDY, *TWO, "trainer.total_steps=2"))
    assert without_times(read_metrics(run_dir)) == without_times(read_metrics(two_workers[1]))


RESUMED = [
    "algorithm.adv_estimator=gae",
    "actor.use_kl_loss=true",
    "actor.kl_loss_coef=0.1",
    "trainer.save_freq=2",
    "trainer.test_freq=2",
    "rollout.val_kwargs.temperature=1",
]


def weights_of(run_dir: Path, part: str) -> dict[str, torch.Tensor]:
    return read_checkpoint(run_dir / "checkpoints" / "step_4" / part)


@pytest.mark.exhaustive
def test_a_run_goes_on_with_another_number_of_workers(small_task: SmallTask, ray_is_up: None, tmp_path: Path) -> None:
    """From two to one and from one to two: sampled tokens, metrics and weights are those of the undisturbed run."""
    whole, two, one = (tmp_path / name for name in ("whole", "two", "one"))
    launch(small_task.ppo(whole, *RESUMED))
    shutil.copytree(whole, one)
    shutil.rmtree(one / "checkpoints" / "step_4")
    launch(small_task.ppo(one, *RESUMED, *TWO))
    launch(small_task.ppo(two, *RESUMED, *TWO, "trainer.total_steps=2"))
    launch(small_task.ppo(two, *RESUMED))
    expected = read_metrics(whole)
    assert len({row["reward/mean"] for row in expected[1:]}) > 1
    for run_dir in (one, two):
        rows = read_metrics(run_dir)
        assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
        for row, other in zip(rows, expected, strict=True):
            for key in other.keys() - NOT_EQUAL:
                if not key.startswith(("time/", "perf/")):
                    assert row[key] == pytest.approx(other[key], rel=1e-5, abs=1e-5), (run_dir.name, row["step"], key)
        for part in ("actor", "critic"):
            for name, tensor in weights_of(whole, part).items():
                torch.testing.assert_close(weights_of(run_dir, part)[name], tensor, rtol=0, atol=1e-5, msg=name)


@pytest.mark.exhaustive
def test_ranks_sample_differently_and_one_worker_can_go_on(
    small_task: SmallTask, ray_is_up: None, tmp_path: Path
) -> None:
    """Both ranks get the same prompts, in two copies each: with one random stream they would answer alike."""
    same = tmp_path / "same.jsonl"
    same.write_text((small_task.folder / "train.jsonl").read_text().splitlines()[0] + "\n")
    Recording.batches_seen = []
    changes = ["trainer.name=recording", f"data.train_files=[{same}]", "data.train_batch_size=1"]
    changes += ["actor.ppo_mini_batch_size=1", "trainer.save_freq=1", "data.val_files=[]"]
    launch(small_task.ppo(tmp_path / "run", *changes, *TWO, "trainer.total_steps=1"))
    responses = [row.tolist() for row in Recording.batches_seen[0]["responses"].unbind()]
    assert responses[:2] != responses[2:]
    launch(small_task.ppo(tmp_path / "run", *changes, "trainer.total_steps=2"))
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [1, 2]
