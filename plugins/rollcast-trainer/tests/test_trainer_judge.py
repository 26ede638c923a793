"""The judge: replicas of a model that rewards ask, in step with training, beside it, and after a death."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest
import torch
from trainer_tools import SmallTask, before_stage, launch, read_metrics, run_stages, set_up
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollcast.config import compose
from rollcast.errors import ConfigError, PluginNotFoundError
from rollcast.protocol import DataProto, Jagged
from rollcast_trainer.ppo import PpoTrainer
from rollcast_trainer.run.run import Run
from rollcast_trainer.run.settings import check_run

pytestmark = pytest.mark.long

REWARD = '''
async def graded(sample, judge):
    """The number of characters of the judge's reply that are digits, and 100 times its length."""
    reply = await judge.ask(f"{sample.prompt}{sample.response}", max_tokens=4)
    return 100.0 * len(reply) + sum(letter.isdigit() for letter in reply)


def alone(sample, judge):
    return 0.0
'''
ONE_THREAD = "{env: {OMP_NUM_THREADS: '1'}}"


@pytest.fixture(scope="module")
def judged(small_task: SmallTask, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("judged")
    (folder / "judged.py").write_text(REWARD)
    return [
        f"reward.reward_kwargs.path={folder / 'judged.py'}:graded",
        "judge.enable=true",
        f"judge.model.path={small_task.model}",
        f"judge.rollout={{name: hf, replica: {ONE_THREAD}}}",
    ]


def judges() -> list[psutil.Process]:
    return [each for each in psutil.Process().children() if "rollcast_serving.process" in each.cmdline()]


def test_the_judge_s_replies_are_those_of_its_model(small_task: SmallTask, judged: list[str], tmp_path: Path) -> None:
    with set_up(small_task.ppo(tmp_path, *judged, "data.train_batch_size=2", "rollout.n=2")) as trainer:
        batch = run_stages(trainer, until="reward")
        metrics = trainer.run.recorder.take()
        scores = Jagged.of(batch["token_level_scores"]).sums()
        (judge,) = judges()
        assert (tmp_path / "logs" / "judge_0.log").exists()
        samples = trainer.run.scorer.score(batch.drop(["token_level_scores"])).samples
    assert not judge.is_running()
    assert metrics["judge/replies"] == 4
    assert 1 <= metrics["judge/reply_tokens"] <= 4
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(small_task.model),
        AutoTokenizer.from_pretrained(small_task.model),
    )
    for score, sample in zip(scores.tolist(), samples, strict=True):
        ids = torch.tensor([tokenizer(sample.prompt + sample.response)["input_ids"]])
        reply = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=4)
        text = tokenizer.decode(reply[0, ids.shape[1] :], skip_special_tokens=True)
        assert score == pytest.approx(100.0 * len(text) + sum(letter.isdigit() for letter in text))


def kill_a_judge_once(trainer: PpoTrainer) -> None:
    killed: list[int] = []

    def kill(batch: DataProto) -> None:
        if not killed:
            (judge,) = (each for each in judges() if is_judge(each))
            killed.append(judge.pid)
            os.kill(judge.pid, signal.SIGKILL)

    before_stage(trainer, "reward", kill)


def is_judge(process: psutil.Process) -> bool:
    return any(Path(each.path).name.startswith("judge_") for each in process.open_files())


@pytest.mark.exhaustive
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_killed_judge_is_started_again(small_task: SmallTask, judged: list[str], tmp_path: Path, ahead: int) -> None:
    beside = [
        *("rollout.mode=colocated", "rollout.weight_sync=shared_memory", f"rollout.replica={ONE_THREAD}"),
        "trainer.max_staleness=1",
    ]
    # The default is shorter than a restart may take on a busy machine.
    changes = [
        *judged,
        "trainer.total_steps=3",
        "data.val_files=[]",
        "reward.timeout_s=600",
        *(beside if ahead else []),
    ]
    config = compose(small_task.ppo(tmp_path, *changes)).config
    run = Run(check_run(config, PpoTrainer))
    trainer = PpoTrainer(run)
    kill_a_judge_once(trainer)
    with run:
        trainer.fit()
    rows = [row for row in read_metrics(tmp_path) if "reward/mean" in row]
    assert [row["step"] for row in rows] == [1, 2, 3]
    # A reply that the dead replica had not given is asked for again. With rollouts ahead of training, all replies for a
    # step may come during the step before, and the step then has none of its own.
    assert sum(row.get("judge/replies", 0) for row in rows) == 3 * 16
    assert all(row["reward/mean"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (["judge.enable=false"], ConfigError, r"asks a judge, and judge\.enable is false"),
        (["judge.model.path=null"], ConfigError, r"needs judge\.model\.path"),
        (["judge.rollout.name=null"], ConfigError, r"needs judge\.rollout\.name; rollouts: .*hf"),
        (["judge.rollout.name=hff"], PluginNotFoundError, r"'hff'[\s\S]*judge\.rollout\.name"),
        (["+judge.rollout.weight_sync=disk"], ConfigError, r"judge\.rollout\.weight_sync is not used"),
        (["+judge.rollout.max_batchsize=1"], ConfigError, r"judge\.rollout\.max_batchsize[\s\S]*max_batch_size"),
        (["reward.reward_manager=prime"], ConfigError, r"reward\.reward_manager=prime has to await it, as naive"),
        (
            ["placement.mapping={judge: benches}"],
            ConfigError,
            r"placement\.mapping\.judge is 'benches', which is not a pool",
        ),
    ],
)
def test_what_no_judge_can_do_is_refused(
    small_task: SmallTask, judged: list[str], tmp_path: Path, changes: list[str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        launch(small_task.ppo(tmp_path, *judged, *changes))
    assert not judges()


def test_a_function_that_cannot_await_the_judge_is_refused(
    small_task: SmallTask, judged: list[str], tmp_path: Path
) -> None:
    path = judged[0].replace(":graded", ":alone")
    with pytest.raises(ConfigError, match="has a parameter judge, whose replies are awaited; make it an async def"):
        launch(small_task.ppo(tmp_path, *judged, path))
