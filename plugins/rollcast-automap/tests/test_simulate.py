"""``rollcast simulate``: the gain of rollouts that start ahead, from a recipe and lengths."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollcast.errors import ConfigError, DataError
from rollcast_automap.simulate_command import app, draw_lengths, read_lengths

#: What a recipe would say; nothing of it is read from disk.
RECIPE = ["model.path=a/model", "data.train_files=[a.jsonl]", "run_dir=runs/none"]
SPEEDS = ["--train-seconds", "4", "--sync-seconds", "0", "--tokens-per-second", "10", "--steps", "40"]


def simulate(*arguments: str) -> list[dict[str, float]]:
    result = CliRunner().invoke(app, [*arguments, *RECIPE, "--json"], catch_exceptions=False)
    assert result.exit_code == 0
    return json.loads(result.stdout)


def test_equal_lengths_give_the_time_that_one_can_work_out(tmp_path: Path) -> None:
    """Forty tokens at ten a second take as long as a step's training, and all sequences run at once."""
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("40\n40\n")
    sizes = ["trainer=ppo", "algorithm=grpo", "engine=fsdp", "rollout=hf", "data.max_response_length=64", "rollout.n=2"]
    arguments = [
        *sizes,
        "data.train_batch_size=8",
        "actor.ppo_mini_batch_size=8",
        *SPEEDS,
        "--lengths",
        str(lengths),
        "--staleness",
        "0,1",
    ]
    turns, beside = simulate(*arguments)
    assert turns["step_s"] == pytest.approx(8.0)
    assert turns["trainer_waits"] == pytest.approx(0.5)
    assert turns["max_age"] == turns["age_bound"] == 0
    assert beside["step_s"] == pytest.approx(4.1)  # the first step waits
    assert beside["speedup"] == pytest.approx(8.0 / 4.1)
    assert beside["max_age"] == 1
    assert beside["dropped"] == 0


def test_the_rule_of_the_recipe_is_simulated() -> None:
    sizes = ["trainer=ppo", "algorithm=grpo", "engine=fsdp", "rollout=hf", "data.train_batch_size=8", "rollout.n=2"]
    (row,) = simulate(
        *sizes,
        "actor.ppo_mini_batch_size=8",
        "trainer.admission=drop",
        *SPEEDS,
        "--staleness",
        "1",
        "--mean-length",
        "100",
    )
    assert row["dropped"] > 0
    assert row["max_age"] <= row["age_bound"] == 1


def test_drawn_lengths_have_their_mean_and_are_those_of_the_prompt() -> None:
    lengths = draw_lengths(100.0, 0.5, 10_000, 8)
    assert lengths(3) == lengths(3) != lengths(4)
    drawn = [length for prompt in range(2000) for length in lengths(prompt)]
    assert sum(drawn) / len(drawn) == pytest.approx(100.0, rel=0.02)
    assert max(draw_lengths(100.0, 2.0, 200, 8)(0)) <= 200


@pytest.mark.parametrize(
    ("text", "message"), [("12\nmany\n", r"line 2: 'many'"), ("0\n", r"line 1: '0'"), ("\n", "has no numbers")]
)
def test_bad_files_are_refused_with_their_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        read_lengths(path, 100, 2)


def test_what_cannot_be_simulated_is_refused() -> None:
    with pytest.raises(ConfigError, match="--staleness is '1,x'"):
        simulate("trainer=ppo", "algorithm=grpo", "engine=fsdp", "rollout=hf", "--staleness", "1,x")
    with pytest.raises(ConfigError, match=r"trainer\.name=sft generates nothing"):
        simulate("trainer=sft", "engine=fsdp")
