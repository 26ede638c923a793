"""The supervised trainer, and a run that starts from one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from trainer_tools import SmallTask, files_of, launch, read_jsonl, read_metrics, without_times

from rollcast import Composed, compose
from rollcast.errors import ConfigError
from rollcast_data.tokenizer import load_tokenizer
from rollcast_testing.tiny import plain_model, tiny_model_folder
from rollcast_trainer.run.goal import Goal
from rollcast_trainer.schemas import StopAtConfig


def test_the_loss_is_the_mean_over_the_response_tokens(small_task: SmallTask, tmp_path: Path) -> None:
    """All 15 rows in one step, against plain transformers; the rollout's temperature has no part in it."""
    changes = ["data.train_batch_size=15", "trainer.total_steps=1", "rollout.temperature=0.5", "data.val_files=[]"]
    launch(small_task.sft(tmp_path, *changes, "actor.ppo_micro_batch_size_per_gpu=4"))
    tokenizer, model = load_tokenizer(small_task.model), plain_model(small_task.model)
    losses = []
    for row in read_jsonl(small_task.folder / "train.jsonl"):
        prompt = tokenizer(row["prompt"])["input_ids"]
        ids = torch.tensor([[*prompt, *tokenizer(row["response"])["input_ids"], tokenizer.eos_token_id]])
        scores = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        losses.append(-scores.gather(-1, ids[0, len(prompt) :, None]).flatten())
    loss = torch.cat(losses).mean()
    loss.backward()
    norm = torch.stack([parameter.grad.square().sum() for parameter in model.parameters()]).sum().sqrt()
    (row,) = read_metrics(tmp_path)
    assert row["sft/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert row["sft/grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    assert row["sft/tokens"] == sum(map(len, losses))


def test_conversations_are_trained_on_the_replies_alone(small_task: SmallTask, tmp_path: Path) -> None:
    """Two turns of four rows in one step, against plain transformers."""
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}>{{ m.content }}{{ eos_token }}"
        "{% else %}{{ m.content }}{% endif %}{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    path = tiny_model_folder(tmp_path / "model", chat_template=template)
    tokenizer, model = load_tokenizer(path), plain_model(path)
    losses, lines = [], []
    for a, b in ((1, 2), (3, 4), (12, 5), (7, 70)):
        turns = (f"{a}+{b}=", f"{a + b}.", f"{b}-1=", f"{b - 1}.")
        roles = ("user", "assistant", "user", "assistant")
        lines.append(json.dumps({"messages": [{"role": r, "content": c} for r, c in zip(roles, turns, strict=True)]}))
        ids, trained = [], []
        for text, is_reply in (
            (f"{turns[0]}\n>", False),
            (turns[1], True),
            (f"\n{turns[2]}\n>", False),
            (turns[3], True),
        ):
            piece = tokenizer(text)["input_ids"] + ([tokenizer.eos_token_id] if is_reply else [])
            ids += piece
            trained += [is_reply] * len(piece)
        scores = model(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        nll = -scores.gather(-1, torch.tensor(ids[1:])[:, None]).flatten()
        losses.append(nll[torch.tensor(trained[1:])])
    loss = torch.cat(losses).mean()
    (tmp_path / "chats.jsonl").write_text("\n".join(lines) + "\n")
    changes = [
        "data=conversations",
        f"model.path={path}",
        f"data.train_files=[{tmp_path / 'chats.jsonl'}]",
        "data.val_files=[]",
        "data.max_response_length=64",
        "data.train_batch_size=4",
        "trainer.total_steps=1",
    ]
    launch(small_task.sft(tmp_path / "run", *changes))
    (row,) = read_metrics(tmp_path / "run")
    assert row["sft/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert row["sft/tokens"] == sum(map(len, losses))


def test_it_learns_and_goes_on_from_a_checkpoint(small_task: SmallTask, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    launch(small_task.sft(whole, "trainer.save_freq=2"))
    launch(small_task.sft(parts, "trainer.save_freq=2", "trainer.total_steps=2"))
    launch(small_task.sft(parts, "trainer.save_freq=2"))
    assert without_times(read_metrics(parts)) == without_times(read_metrics(whole))
    losses = [row["sft/loss"] for row in read_metrics(whole)[1:]]
    assert losses[-1] < 0.8 * losses[0]
    samples = read_jsonl(whole / "samples.jsonl")
    # Generated responses are compared with the rows' own.
    assert {sample["ground_truth"] for sample in samples} == {"4.", "5.", "6."}


def test_it_stops_at_a_goal_and_stays_there(small_task: SmallTask, tmp_path: Path) -> None:
    """Any accuracy is at least 0, so it stops at the first validation, and does nothing when started again."""
    changes = ["trainer.stop_at.value=0.0", "trainer.save_freq=1", "trainer.val_before_train=false"]
    for _ in range(2):
        assert launch(small_task.sft(tmp_path, *changes)).step == 2
        assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]
    assert launch(small_task.sft(tmp_path / "at_once", "trainer.stop_at.value=0.0")).step == 0


def test_the_goal_is_on_the_metric_that_is_named(small_task: SmallTask, tmp_path: Path) -> None:
    """Every answer scores 0.5 and none counts as correct, so the run stops by the score and not by the accuracy."""
    (small_task.folder / "half.py").write_text("def half(_sample):\n    return 0.5\n")
    half = ["reward=function", f"reward.reward_kwargs.path={small_task.folder / 'half.py'}:half"]
    for metric, value, step in (("val/reward", 0.5, 2), ("val/reward", 0.6, 4), ("val/accuracy", 0.5, 4)):
        goal = [f"trainer.stop_at.metric={metric}", f"trainer.stop_at.value={value}", "trainer.val_before_train=false"]
        run_dir = tmp_path / f"{metric.removeprefix('val/')}-{value}"
        assert launch(small_task.sft(run_dir, *half, *goal)).step == step


@pytest.mark.exhaustive
def test_a_goal_on_another_metric_does_not_take_over_what_the_first_one_reached(
    small_task: SmallTask, tmp_path: Path
) -> None:
    changes = ["trainer.save_freq=1", "trainer.val_before_train=false"]
    samples = ["trainer.stop_at.metric=val/samples", "trainer.stop_at.value=5"]
    assert launch(small_task.sft(tmp_path, *changes, *samples)).step == 2
    assert launch(small_task.sft(tmp_path, *changes, "trainer.stop_at.value=1.1")).step == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["trainer.test_freq=-1"], r"trainer\.stop_at\.value is 0\.5, but trainer\.test_freq=-1 never validates"),
        (["data.val_files=[]"], r"trainer\.stop_at\.value is 0\.5, but data\.val_files is empty"),
        (
            ["trainer.stop_at.metric=val/rewards"],
            r"trainer\.stop_at\.metric is 'val/rewards', which the validation does not .*val/accuracy, val/reward, ",
        ),
    ],
)
def test_a_goal_that_is_never_measured_is_refused(
    small_task: SmallTask, tmp_path: Path, changes: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        launch(small_task.sft(tmp_path, "trainer.stop_at.value=0.5", *changes))


def test_a_run_of_a_policy_ends_when_its_metric_rises_no_more(small_task: SmallTask, tmp_path: Path) -> None:
    goal = ["trainer.stop_at.metric=val/samples", "trainer.stop_at.patience=1"]  # as many at every validation
    for _ in range(2):
        assert launch(small_task.ppo(tmp_path, *goal)).step == 2
        assert [row["step"] for row in read_metrics(tmp_path)] == [0, 1, 2]


def test_patience_counts_validations_without_a_rise() -> None:
    goal = Goal(StopAtConfig(metric="m", value=0.9, patience=2))
    for value in (0.1, 0.3, 0.3, 0.4, 0.2):
        goal.see({"m": value})
        assert goal.reason == ""
    again = Goal(StopAtConfig(metric="m", patience=2))
    again.load_state_dict(goal.state_dict())
    again.see({"m": 0.4})
    assert again.reason == "m did not rise above 0.4 in 2 validations, and trainer.stop_at.patience is 2"
    goal.see({"m": 0.95})
    assert goal.reason == "m is 0.95, and trainer.stop_at.value is 0.9"
    other = Goal(StopAtConfig(metric="n", patience=2))
    other.load_state_dict(again.state_dict())
    assert other.reason == ""


def test_keys_of_the_policy_loss_do_not_exist(small_task: SmallTask, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"actor\.clip_ratio_low"):
        launch(small_task.sft(tmp_path, "actor.clip_ratio_low=0.1"))


@pytest.fixture
def warm_recipe(small_task: SmallTask, monkeypatch: pytest.MonkeyPatch) -> str:
    """An override that warms up with a supervised recipe of this test, under the name of an installed one."""

    def compose_warm(overrides: list[str]) -> Composed:
        given = dict(each.split("=", 1) for each in overrides)
        assert given.pop("recipe") == "gsm8k_grpo"  # a recipe that this distribution has
        run_dir = Path(given.pop("run_dir").strip("'"))
        return compose(small_task.sft(run_dir, *(f"{key}={value}" for key, value in given.items())))

    monkeypatch.setattr("rollcast_trainer.run.preparation.compose", compose_warm)
    return "trainer.warm_start=gsm8k_grpo"


def test_a_warm_start_is_trained_once_and_started_from(small_task: SmallTask, tmp_path: Path, warm_recipe: str) -> None:
    """With a learning rate of 0 the run ends with the weights that it began with."""
    from rollcast_testing.tiny import plain_model, plain_weights

    changes = [warm_recipe, "actor.optim.lr=0", "trainer.export=true", "trainer.seed=3"]
    launch(small_task.ppo(tmp_path, *changes, "trainer.total_steps=1"))
    weights = {
        name: plain_weights(plain_model(folder))
        for name, folder in {
            "first": small_task.model,
            "warm": tmp_path / "warm_start" / "export",
            "last": tmp_path / "export",
        }.items()
    }
    for name, tensor in weights["warm"].items():
        assert torch.equal(tensor, weights["last"][name])
    assert any(not torch.equal(tensor, weights["first"][name]) for name, tensor in weights["warm"].items())
    assert "seed: 3" in (tmp_path / "warm_start" / "config.yaml").read_text()
    before = files_of(tmp_path / "warm_start")
    assert launch(small_task.ppo(tmp_path, *changes, "trainer.total_steps=2")).step == 2
    assert files_of(tmp_path / "warm_start") == before


@pytest.mark.exhaustive
def test_a_warm_start_with_another_seed_is_not_taken_for_this_one(
    small_task: SmallTask, tmp_path: Path, warm_recipe: str
) -> None:
    launch(small_task.ppo(tmp_path / "a", warm_recipe, "trainer.total_steps=1"))
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "warm_start").rename(tmp_path / "b" / "warm_start")
    with pytest.raises(ConfigError, match=r"warm_start holds a run with other settings \(trainer.seed: 0 then, 1 now"):
        launch(small_task.ppo(tmp_path / "b", warm_recipe, "trainer.seed=1"))
