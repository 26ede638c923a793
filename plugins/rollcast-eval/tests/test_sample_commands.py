"""``rollcast generate`` and ``rollcast eval``: what they write, go on with, compute and refuse."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from trainer_tools import SmallTask, read_jsonl
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from rollcast.config import compose
from rollcast.contracts.rollout import rollouts
from rollcast.errors import ConfigError, DataError, RollcastError
from rollcast_eval.commands import eval_app, generate_app
from rollcast_eval.job import SampleJob
from rollcast_eval.samples_file import SamplesFile

pytestmark = pytest.mark.long

ROWS = {"index": 0, "sample": 0, "response": "x"}


def settings(task: SmallTask, *changes: str) -> list[str]:
    return [
        f"model.path={task.model}",
        "data.max_prompt_length=16",
        "data.max_response_length=6",
        "runtime=local",
        "rollout.n=3",
        "sample.chunk_size=4",
        "rollout.replica.env={OMP_NUM_THREADS: '1'}",
        *changes,
    ]


def run(app: Any, *arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def generated(small_task: SmallTask, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Samples of 15 prompts, asked for one prompt after the other."""
    output = tmp_path_factory.mktemp("generated") / "deep" / "out.jsonl"
    prompts = small_task.folder / "train.jsonl"
    text = run(generate_app, str(prompts), str(output), *settings(small_task, "sample.chunk_size=1"))
    assert "45 samples of 15 prompts" in text
    return output


@pytest.mark.exhaustive
def test_model_and_prompts_may_be_urls(
    small_task: SmallTask, generated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLCAST_CACHE_DIR", str(tmp_path / "cache"))
    output = tmp_path / "out.jsonl"
    prompts = f"file://{small_task.folder / 'train.jsonl'}"
    run(generate_app, prompts, str(output), *settings(small_task, f"model.path=file://{small_task.model}"))
    assert read_jsonl(output) == read_jsonl(generated)
    assert any((tmp_path / "cache").rglob("model*.safetensors"))


def test_generate_goes_on_where_it_was_cut_off(small_task: SmallTask, generated: Path, tmp_path: Path) -> None:
    prompts, output = small_task.folder / "train.jsonl", tmp_path / "out.jsonl"
    shutil.copytree(generated.parent, tmp_path, dirs_exist_ok=True)
    whole = read_jsonl(output)
    asked = read_jsonl(prompts)
    assert [(row["index"], row["sample"]) for row in whole] == [(i, j) for i in range(15) for j in range(3)]
    for row in whole:
        assert row["prompt"] == asked[row["index"]]["prompt"]
        assert row["ground_truth"] == asked[row["index"]]["ground_truth"]  # carried along, like any other column
    assert len({row["response"] for row in whole}) > 15
    output.write_bytes(output.read_bytes()[: output.stat().st_size * 2 // 3])
    run(generate_app, str(prompts), str(output), *settings(small_task, "sample.chunk_size=100"))
    assert read_jsonl(output) == whole
    before = output.read_bytes()
    run(generate_app, str(prompts), str(output), *settings(small_task))  # nothing is left to do
    assert output.read_bytes() == before
    with pytest.raises(ConfigError, match=r"other settings \(rollout.temperature was 1.0, is 0.5\)"):
        run(generate_app, str(prompts), str(output), *settings(small_task, "rollout.temperature=0.5"))
    assert output.read_bytes() == before


def test_eval_scores_and_counts(small_task: SmallTask, tmp_path: Path) -> None:
    prompts, output = small_task.folder / "test.jsonl", tmp_path / "scored.jsonl"
    reward = ["reward=function", "reward.reward_manager=naive", "rollout.n=4"]
    reward.append(f"reward.reward_kwargs.path={small_task.folder / 'reward.py'}:has_digit")
    arguments = [str(prompts), "--output", str(output), *settings(small_task, *reward)]
    table = run(eval_app, *arguments)
    for title in ("accuracy", "pass@2", "pass@4", "maj@4"):
        assert title in table
    rows = read_jsonl(output)
    assert len(rows) == 20
    for row in rows:
        assert row["correct"] == any(letter.isdigit() for letter in row["response"])
    metrics = json.loads(run(eval_app, *arguments, "--json"))
    right = [sum(row["correct"] for row in rows if row["index"] == index) for index in range(5)]
    assert metrics["val/acc/mean@4"] == pytest.approx(sum(right) / 20)
    pass_at_2 = [1 - math.comb(4 - count, 2) / math.comb(4, 2) for count in right]
    assert metrics["val/acc/best@2/mean"] == pytest.approx(sum(pass_at_2) / 5)


@pytest.mark.exhaustive
def test_eval_asks_a_judge(small_task: SmallTask, tmp_path: Path) -> None:
    (tmp_path / "judged.py").write_text(
        "async def graded(sample, judge):\n    return float(len(await judge.ask(sample.response, max_tokens=3)))\n"
    )
    prompts, output = small_task.folder / "test.jsonl", tmp_path / "scored.jsonl"
    reward = ["reward=function", "reward.reward_manager=naive", "data.val_max_samples=2"]
    reward.append(f"reward.reward_kwargs.path={tmp_path / 'judged.py'}:graded")
    arguments = [str(prompts), "--output", str(output)]
    with pytest.raises(ConfigError, match=r"asks a judge, and judge\.enable is false"):
        run(eval_app, *arguments, *settings(small_task, *reward))
    judge = ["judge.enable=true", f"judge.model.path={small_task.model}", "judge.rollout={name: hf}"]
    run(eval_app, *arguments, *settings(small_task, *reward, *judge))
    rows = read_jsonl(output)
    assert len(rows) == 6
    tokenizer = AutoTokenizer.from_pretrained(small_task.model)
    model = AutoModelForCausalLM.from_pretrained(small_task.model)
    for row in rows:
        ids = torch.tensor([tokenizer(row["response"])["input_ids"]])
        reply = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=3)
        assert row["score"] == len(tokenizer.decode(reply[0, ids.shape[1] :], skip_special_tokens=True))


def test_eval_scores_as_many_rows_as_a_validation(small_task: SmallTask, tmp_path: Path) -> None:
    config = compose(["trainer=sample", *settings(small_task, "data.val_max_samples=3")]).config
    prompts = small_task.folder / "test.jsonl"
    assert len(SampleJob(config, prompts, tmp_path / "scored.jsonl", scored=True).dataset) == 3
    assert len(SampleJob(config, prompts, tmp_path / "samples.jsonl", scored=False).dataset) == 5


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        (["rollout.n=0"], ConfigError, "rollout.n must be at least 1, got 0"),
        (["sample.chunk_size=0"], ConfigError, "sample.chunk_size must be at least 1, got 0"),
        (["rollout.nn=2"], ConfigError, r"rollout.nn"),
        (["model.path=/no/such/folder"], RollcastError, "/no/such/folder"),
        (["data.prompt_key=question"], DataError, "question"),
    ],
)
def test_refused(small_task: SmallTask, tmp_path: Path, changes: list[str], error: type, words: str) -> None:
    output = tmp_path / "out.jsonl"
    with pytest.raises(error, match=words):
        run(generate_app, str(small_task.folder / "train.jsonl"), str(output), *settings(small_task, *changes))
    assert not output.exists()


def test_no_prompts_and_no_samples(small_task: SmallTask, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no file of prompts"):
        run(generate_app, str(tmp_path / "none.jsonl"), str(tmp_path / "out.jsonl"), *settings(small_task))
    mine = tmp_path / "mine.jsonl"
    mine.write_text("something of mine\n")
    with pytest.raises(ConfigError, match="is no file of samples"):
        run(generate_app, str(small_task.folder / "train.jsonl"), str(mine), *settings(small_task))
    assert mine.read_text() == "something of mine\n"


def test_a_file_with_something_else_in_it(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    SamplesFile(path, {"a": 1}, 1).add([ROWS])
    assert SamplesFile(path, {"a": 1}, 1).missing(3) == [1, 2]
    path.write_text('{"other": 1}\n' + json.dumps(ROWS) + "\n")
    with pytest.raises(DataError, match="line 1 is no sample"):
        SamplesFile(path, {"a": 1}, 1)
    with pytest.raises(DataError, match="cannot be written"):
        SamplesFile(path / "below", {"a": 1}, 1)


def test_a_file_of_other_settings_is_kept_unless_it_is_empty_or_to_be_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    SamplesFile(path, {"a": 1}, 1)  # the command failed before its first samples
    SamplesFile(path, {"a": 2}, 1).add([ROWS])
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"a was 2, is 3\); continue with its settings, .*--overwrite"):
        SamplesFile(path, {"a": 3}, 1)
    assert path.read_bytes() == before
    replaced = SamplesFile(path, {"a": 3}, 1, overwrite=True)
    assert replaced.rows == {}
    assert path.read_bytes() == b""
    mine = tmp_path / "mine.jsonl"
    mine.write_text("something of mine\n")
    with pytest.raises(ConfigError, match="is no file of samples"):
        SamplesFile(mine, {"a": 3}, 1, overwrite=True)
    assert mine.read_text() == "something of mine\n"


def test_another_rollout_does_not_continue_a_file(small_task: SmallTask, tmp_path: Path) -> None:
    output, prompts = tmp_path / "out.jsonl", small_task.folder / "train.jsonl"
    config: Any = OmegaConf.create(OmegaConf.to_container(compose(["trainer=sample", *settings(small_task)]).config))
    SampleJob(config, prompts, output, scored=False).file.add([{**ROWS, "sample": number} for number in range(3)])
    with rollouts.temporarily("test_other", rollouts.get("hf")):
        config.rollout.name = "test_other"
        with pytest.raises(ConfigError, match=r"rollout.name was 'hf', is 'test_other'"):
            SampleJob(config, prompts, output, scored=False)
        assert SampleJob(config, prompts, output, scored=False, overwrite=True).file.rows == {}


def test_samples_do_not_depend_on_the_order(small_task: SmallTask, generated: Path, tmp_path: Path) -> None:
    config = compose(["trainer=sample", *settings(small_task, "sample.chunk_size=15")]).config
    job = SampleJob(config, small_task.folder / "train.jsonl", tmp_path / "out.jsonl", scored=False)
    assert job.run() == read_jsonl(generated)
