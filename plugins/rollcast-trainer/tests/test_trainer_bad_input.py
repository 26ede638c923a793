"""Mistakes end in one message that names the key, before anything is started where that is possible."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from trainer_tools import SmallTask, launch, read_metrics, set_up

from rollcast.config import compose
from rollcast.contracts.hooks import hookimpl, hooks
from rollcast.errors import CapabilityError, ConfigError, DataError, PluginNotFoundError, ResourceError, RewardError
from rollcast_trainer.ppo import PpoTrainer
from rollcast_trainer.run.settings import check_run


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        (["actor.ppo_mini_batch_size=3"], ConfigError, r"data.train_batch_size=4 .*actor.ppo_mini_batch_size=2 or 4"),
        (["actor.ppo_mini_batch_size=8"], ConfigError, r"actor.ppo_mini_batch_size=4, or data.train_batch_size=8"),
        (["rollout.n=1"], ConfigError, r"algorithm.adv_estimator=grpo .*rollout.n is 1"),
        (["rollout.n=0"], ConfigError, r"rollout.n must be at least 1, got 0"),
        (["actor.ppo_epochs=0"], ConfigError, r"actor.ppo_epochs must be at least 1, got 0"),
        (["actor.ppo_mini_batch_size=-2"], ConfigError, r"actor.ppo_mini_batch_size must be at least 1, got -2"),
        (["data.train_batch_size=0"], ConfigError, r"data.train_batch_size must be at least 1, got 0"),
        (
            ["algorithm.filter_groups.max_num_gen_batches=0"],
            ConfigError,
            r"algorithm.filter_groups.max_num_gen_batches must be at least 1, got 0",
        ),
        (
            ["actor.ppo_micro_batch_size_per_gpu=0"],
            ConfigError,
            r"actor.ppo_micro_batch_size_per_gpu must be at least 1 or null, got 0",
        ),
        (
            ["actor.log_prob_micro_batch_size_per_gpu=-1"],
            ConfigError,
            r"log_prob_micro_batch_size_per_gpu must be at least 1 or null, got -1",
        ),
        (
            ["actor.use_dynamic_bsz=true", "actor.ppo_max_token_len_per_gpu=20"],
            ConfigError,
            r"ppo_max_token_len_per_gpu is 20, .*22 tokens",
        ),
        (["trainer.save_freq=0"], ConfigError, r"trainer.save_freq must be -1 or at least 1, got 0"),
        (["trainer.max_ckpt_to_keep=0"], ConfigError, r"trainer.max_ckpt_to_keep must be -1 or at least 1, got 0"),
        (["trainer.total_steps=0"], ConfigError, r"trainer.total_steps must be at least 1 or null, got 0"),
        (["trainer.resume_mode=never"], ConfigError, r"trainer.resume_mode must be one of auto, disable, got 'never'"),
        (["placement.device=tpu"], ConfigError, r"placement.device is 'tpu'"),
        (["placement.nnodes=0"], ConfigError, r"placement.nnodes must be at least 1, got 0"),
        (
            ["placement.mapping={critic: apart}"],
            ConfigError,
            r"placement.mapping.critic is 'apart', which is not a pool",
        ),
        (
            ["placement.mapping={jury: global_pool}"],
            ConfigError,
            r"role 'jury'; roles: actor_rollout, .*critic, .*ref",
        ),
        (["placement.pools={apart: [0]}"], ConfigError, r"placement.pools.apart is \[0\]"),
        (["placement.pools={apart: [1]}"], ConfigError, r"placement.mapping puts no role in placement.pools.apart"),
        (["placement.pools={global_pool: [1]}"], ConfigError, r"placement.pools names 'global_pool'"),
        (["critic.cliprange_value=0"], ConfigError, r"critic.cliprange_value must be above 0, got 0"),
        (["critic.ppo_epochs=0"], ConfigError, r"critic.ppo_epochs must be at least 1, got 0"),
        (["trainer.critic_warmup=-1"], ConfigError, r"trainer.critic_warmup must be at least 0, got -1"),
        (["rollout.mode=standalone"], CapabilityError, r"rollout.mode=standalone.*hybrid"),
        (["actor.policy_loss=vanila"], PluginNotFoundError, r"actor.policy_loss.*vanila.*vanilla"),
        (["actor.loss_agg_mode=tokens"], PluginNotFoundError, r"actor.loss_agg_mode.*token-mean"),
        (["algorithm.adv_estimator=grop"], PluginNotFoundError, r"algorithm.adv_estimator.*grpo"),
        (
            ["algorithm.use_kl_in_reward=true", "algorithm.kl_penalty=k9"],
            PluginNotFoundError,
            r"algorithm.kl_penalty.*k9.*k1",
        ),
        (["actor.use_kl_loss=true", "actor.kl_loss_type=k9"], PluginNotFoundError, r"actor.kl_loss_type.*k9"),
        (["trackers=[jsnl]"], PluginNotFoundError, r"jsnl.*jsonl"),
        (["rollout.weight_sync=nccl"], PluginNotFoundError, r"nccl.*in_process"),
        (["actor.clip_ratio_c=0.5"], ConfigError, r"actor.clip_ratio_c must be above 1, got 0.5"),
    ],
)
def test_settings_that_cannot_work_touch_nothing(
    small_task: SmallTask, tmp_path: Path, changes: list[str], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=f"(?s){says}"):
        launch(small_task.ppo(tmp_path / "run", *changes))
    assert not (tmp_path / "run").exists()


GOOD = json.dumps({"prompt": "3+1=", "ground_truth": "4"}) + "\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, r"data.train_files: .*rows.jsonl does not exist"),
        ("", r"data.train_files: .*rows.jsonl holds no rows"),
        (GOOD + "{not json\n", r"data.train_files: .*rows.jsonl:2: not JSON"),
        (
            GOOD + json.dumps({"question": "3+1=", "ground_truth": "4"}) + "\n",
            r"rows.jsonl:2: .*'prompt' \(data.prompt_key\).*question",
        ),
        (GOOD + json.dumps({"prompt": "1"}) + "\n", r"rows.jsonl:2: .*'ground_truth' \(data.ground_truth_key\)"),
        (json.dumps({"prompt": "1" * 99, "ground_truth": "4"}) + "\n", r"data.max_prompt_length=16"),
    ],
)
@pytest.mark.parametrize("split", ["train", "val"])
def test_bad_rows(small_task: SmallTask, tmp_path: Path, text: str | None, says: str, split: str) -> None:
    file = tmp_path / "rows.jsonl"
    if text is not None:
        file.write_text(text)
    with pytest.raises(DataError, match=says.replace("train_files", f"{split}_files")):
        launch(small_task.ppo(tmp_path / "run", f"data.{split}_files=[{file}]"))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_fewer_rows_than_a_batch(small_task: SmallTask, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(GOOD * 3)
    says = r"data.train_batch_size: the batch size 4 is larger than the dataset: it has 3 rows"
    with pytest.raises(DataError, match=says):
        launch(small_task.ppo(tmp_path / "run", f"data.train_files=[{tmp_path / 'rows.jsonl'}]"))


def test_no_training_files(small_task: SmallTask, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.train_files is empty"):
        launch(small_task.ppo(tmp_path, "data.train_files=[]"))


def test_a_model_folder_without_a_tokenizer(small_task: SmallTask, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(small_task.model / "config.json", bare)
    with pytest.raises(ConfigError, match=r"model.path: .*bare has no tokenizer"):
        launch(small_task.ppo(tmp_path / "run", f"model.path={bare}"))


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("raise KeyError('no answer')", "KeyError: 'no answer'.*sample 0"),
        ("return float('nan')", "nan, which is not finite"),
        ("return 'good'", "'good', which is not a number"),
        ("return None", "None, which is not a number"),
    ],
)
def test_a_bad_reward_ends_the_run_and_keeps_what_was_saved(
    small_task: SmallTask, tmp_path: Path, body: str, says: str
) -> None:
    """It turns bad in the third step, after the checkpoint of the second."""
    (tmp_path / "mine.py").write_text(
        "import itertools\ncount = itertools.count()\n\n\ndef score(sample):\n"
        f"    if next(count) < 16 + 16:\n        return float(len(sample.response) % 2)\n    {body}\n"
    )
    changes = [f"reward.reward_kwargs.path={tmp_path / 'mine.py'}:score", "data.val_files=[]"]
    with pytest.raises(RewardError, match=f"(?s)mine.py:score .*{says}"):
        launch(small_task.ppo(tmp_path / "run", *changes))
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [1, 2]
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir() if path.name != "latest"] == ["step_2"]


def test_other_settings_than_the_checkpoints_are_refused(small_task: SmallTask, tmp_path: Path) -> None:
    launch(small_task.ppo(tmp_path, "trainer.total_steps=2"))
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=r"actor.optim.lr: 0.01 then, 0.5 now"):
        launch(small_task.ppo(tmp_path, "actor.optim.lr=0.5"))
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert "lr: 0.01" in (tmp_path / "config.yaml").read_text()


def test_more_processes_than_the_runtime_can_host(small_task: SmallTask, tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match=r"placement.n_gpus_per_node"):
        launch(small_task.ppo(tmp_path, "placement.n_gpus_per_node=64"))


def test_tool_of_no_engine(small_task: SmallTask, tmp_path: Path) -> None:
    tree = compose(small_task.ppo(tmp_path)).plain()
    tree["actor"]["engine"] = {}
    config = OmegaConf.create(tree)
    with pytest.raises(ConfigError, match=r"actor.engine.name is not set; choose one with engine="):
        check_run(config, PpoTrainer)


def test_a_tracker_that_fails_to_close_does_not_keep_the_workers(
    small_task: SmallTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from rollcast_report.jsonl import JsonlTracker

    def fail(self: JsonlTracker) -> None:
        raise OSError("cannot close")

    monkeypatch.setattr(JsonlTracker, "close", fail)
    with set_up(small_task.ppo(tmp_path)) as trainer:
        host = trainer.run.actor.group.workers[0].handle
        assert host.workers
    assert not host.workers
    assert "cannot close" in caplog.text


class CountingHooks:
    """A listener that counts the runs that are configured."""

    configured = 0

    @hookimpl
    def on_configure(self) -> None:
        type(self).configured += 1


@pytest.mark.parametrize(("off", "heard"), [("[]", 1), ("[counting]", 0), ("[counting,not_installed]", 0)])
def test_listeners_are_left_out_by_name(
    small_task: SmallTask, tmp_path: Path, caplog: pytest.LogCaptureFixture, off: str, heard: int
) -> None:
    CountingHooks.configured = 0
    with hooks.temporarily("counting", CountingHooks), caplog.at_level("WARNING", logger="rollcast.plugins"):
        check_run(compose(small_task.ppo(tmp_path, f"disabled_hooks={off}")).config, PpoTrainer)
    assert CountingHooks.configured == heard
    # A recipe may name a listener that this machine does not have.
    assert ("not_installed" in caplog.text) == ("not_installed" in off)
