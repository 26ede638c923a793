from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from rollcast.contracts.reward import RewardSample
from rollcast.errors import DataError
from rollcast_agents.tool_formats import tool_format
from rollcast_calculator.task import SPLITS, Calculations, CalculatorReward, calculator
from rollcast_calculator.tokenizer import CALL_END, CALL_START, VOCABULARY
from rollcast_data.files import read_rows
from rollcast_eval.commands import eval_app
from rollcast_eval.composition import compose_samples


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calculator")
    report = Calculations().run(None, folder, seed=3)
    assert report.rows == {"test.jsonl": 500, "sft.jsonl": 2000, "sft_stop.jsonl": 500, "train.jsonl": 6000}
    return folder


def columns(path: Path) -> list[dict[str, Any]]:
    return [dict(row.values) for row in read_rows(path)]


def question_of(row: dict[str, Any]) -> str:
    return str(row["prompt"][0]["content"])


def test_questions_are_answered_by_their_expression_and_not_repeated(made: Path) -> None:
    rows = [row for split in ("train", "test") for row in columns(made / f"{split}.jsonl")]
    assert all(calculator(row["extra_info"]["expression"]) == row["ground_truth"] for row in rows)
    warm = {question_of(row) for split in ("sft", "sft_stop") for row in columns(made / f"{split}.jsonl")}
    asked = {question_of(row) for row in rows}
    assert len(asked) == len(rows)
    assert len(warm) == SPLITS["sft"] + SPLITS["sft_stop"]
    assert not warm & asked


def test_the_data_is_a_function_of_the_seed(made: Path, tmp_path: Path) -> None:
    for seed in (3, 4):
        Calculations().run(None, tmp_path / str(seed), seed=seed)
    for split in SPLITS:
        name = f"{split}.jsonl"
        assert (tmp_path / "3" / name).read_bytes() == (made / name).read_bytes()
        assert (tmp_path / "4" / name).read_bytes() != (made / name).read_bytes()


def test_replies_of_the_warm_up_are_the_tokens_that_the_agent_samples(made: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(made / "model"))
    assert len(tokenizer) == len(VOCABULARY)
    call, answer = columns(made / "sft.jsonl")[:2]
    parsed = tool_format("hermes")(call["response"])
    (made_call,) = parsed.calls
    result = calculator(**made_call.arguments)
    assert answer["prompt"][-1] == {"role": "tool", "name": "calculator", "content": result}
    assert answer["response"] == result
    first = tokenizer.apply_chat_template(call["prompt"], tokenize=False)
    second = tokenizer.apply_chat_template(answer["prompt"], tokenize=False)
    # The template renders the parsed call as the model wrote it.
    assert second.startswith(f"{first}{call['response']}<eos>")
    for text in (first + call["response"], second + answer["response"]):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="reads no source"):
        Calculations().run(tmp_path, tmp_path / "out")


@pytest.mark.parametrize(
    "expression", ["2**9", "1/2", "__import__('os')", "a+1", "1+", "", "1+" * 40 + "1", "True+1", "-3"]
)
def test_the_tool_calculates_nothing_else(expression: str) -> None:
    with pytest.raises(ValueError, match=r"calculated|no expression"):
        calculator(expression)


CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"function": {"name": "calculator", "arguments": {"expression": "2*30"}}}],
}
RESULT = {"role": "tool", "content": "60"}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("messages", "finished", "score", "correct"),
    [
        ([CALL, RESULT, said("60")], True, 1.2, True),
        ([said(" 60 ")], True, 1.0, True),
        ([CALL, RESULT, said("61")], True, 0.2, False),
        ([CALL, RESULT, said("60")], False, 0.2, False),
        ([CALL, RESULT], True, 0.2, False),
        ([said(f"{CALL_START}2*30{CALL_END}")], True, 0.0, False),
        ([], True, 0.0, False),
    ],
)
def test_reward(messages: list[Any], finished: bool, score: float, correct: bool) -> None:
    extra = {"expression": "2*30", "messages": messages}
    result = CalculatorReward().score(RewardSample("", "", "60", finished=finished, extra_info=extra))
    assert result.score == pytest.approx(score)
    assert result.correct is correct


def test_an_evaluation_takes_its_sections_from_the_recipe() -> None:
    overrides = ["recipe=calculator_tool", "model.path=m", "rollout.n=2", "sample.seed=3"]
    config = compose_samples(overrides).config
    assert (config.agent.loop, dict(config.agent.tools)) == ("tool", {"calculator": {}})
    assert (config.data.max_response_length, config.reward.name) == (48, "calculator")
    assert (config.model.path, config.rollout.n, config.sample.seed) == ("m", 2, 3)
    assert (config.rollout.mode, config.rollout.weight_sync) == ("colocated", "disk")
    assert "actor" not in config


@pytest.mark.long
@pytest.mark.exhaustive
def test_a_model_is_evaluated_by_the_recipe(made: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    AutoTokenizer.from_pretrained(str(made / "model")).save_pretrained(model)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(str(made / "model"))).save_pretrained(model)
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "scored.jsonl"
    prompts.write_text("".join((made / "test.jsonl").read_text().splitlines(keepends=True)[:2]))
    options = ["recipe=calculator_tool", f"model.path={model}", "rollout.n=2", "runtime=local"]
    result = CliRunner().invoke(
        eval_app, [str(prompts), "--output", str(output), "--json", *options], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    metrics = json.loads(result.stdout)
    assert 1 <= metrics["rollout/turns"] <= 2  # agent.max_assistant_turns of the recipe
    assert {"rollout/tool_calls", "rollout/tool_errors", "val/acc/best@2/mean"} <= set(metrics)
    assert len(output.read_text().splitlines()) == 4
