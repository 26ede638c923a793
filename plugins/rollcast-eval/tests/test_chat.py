"""``rollcast chat``: its replies are the model's own, turn by turn, and errors cost one message."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from trainer_tools import SmallTask
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from rollcast.errors import ConfigError, DataError
from rollcast_data.schemas import DataConfig
from rollcast_eval.chat import _read_opening, chat_app, find_model

pytestmark = pytest.mark.long

TEMPLATE = "{% for m in messages %}{{ m.role[0] + m.content + '=' }}{% endfor %}"


@pytest.fixture(scope="module")
def model(small_task: SmallTask, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model, with a chat template."""
    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(small_task.model, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def talk(model: Path, lines: str, *arguments: str) -> tuple[str, str]:
    keys = ["runtime=local", "data.max_response_length=6", "rollout.replica.env={OMP_NUM_THREADS: '1'}"]
    result = CliRunner().invoke(chat_app, [str(model), *keys, *arguments], input=lines, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout, result.stderr


def expect(model: Path, messages: list[tuple[str, str]]) -> str:
    """The greedy continuation by transformers alone."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    text = "".join(f"{role[0]}{content}=" for role, content in messages)
    ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
    made = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).generate(
        ids, max_new_tokens=6, do_sample=False
    )
    return str(tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True))


def test_a_conversation_goes_on_and_starts_again(model: Path, tmp_path: Path) -> None:
    opening = tmp_path / "prompts.jsonl"
    turns = [{"role": "system", "content": "1"}, {"role": "user", "content": "never asked"}]
    opening.write_text(json.dumps({"prompt": turns}) + "\n")
    first = expect(model, [("system", "1"), ("user", "12")])
    second = expect(model, [("system", "1"), ("user", "12"), ("assistant", first), ("user", "34")])
    out, _ = talk(model, "12\n\n34\n/clear\n12\n", "--opening", str(opening))
    assert out.split("\n") == [first, second, first, ""]
    assert talk(model, "12\n", "--system", "1")[0] == f"{first}\n"
    assert talk(model, "12\n")[0] == expect(model, [("user", "12")]) + "\n"


@pytest.mark.exhaustive
def test_a_message_that_is_too_long_is_dropped(model: Path) -> None:
    out, err = talk(model, "1" * 3000 + "\n12\n")
    assert out == expect(model, [("user", "12")]) + "\n"
    assert "error: " in err and "/clear starts a new conversation" in err


def test_a_run_is_represented_by_its_export(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no model, run directory or file"):
        find_model(str(tmp_path / "nothing"))
    assert find_model(str(tmp_path)) == str(tmp_path)
    assert find_model("s3://models/a") == "s3://models/a"
    (tmp_path / "config.yaml").write_text("")
    with pytest.raises(ConfigError, match="it has no checkpoint either"):
        find_model(str(tmp_path))
    (tmp_path / "checkpoints" / "step_3").mkdir(parents=True)
    (tmp_path / "checkpoints" / "latest").write_text("step_3")
    with pytest.raises(ConfigError, match=f"rollcast export {tmp_path}/checkpoints/step_3 {tmp_path}/export"):
        find_model(str(tmp_path))
    (tmp_path / "export").mkdir()
    assert find_model(str(tmp_path)) == str(tmp_path / "export")


def test_an_opening_has_messages(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "1+1="}) + "\n")
    with pytest.raises(DataError, match="the prompt is a string, and --opening needs one of messages"):
        _read_opening(None, prompts, DataConfig())
    with pytest.raises(ConfigError, match="--system and --opening"):
        _read_opening("be brief", prompts, DataConfig())
    prompts.write_text("")
    with pytest.raises(DataError):
        _read_opening(None, prompts, DataConfig())
    prompts.write_text(json.dumps({"asked": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}))
    assert _read_opening(None, prompts, DataConfig(prompt_key="asked")) == [{"role": "system", "content": "s"}]
