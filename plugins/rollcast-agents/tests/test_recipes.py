"""The recipe ``gsm8k_tool``: sizes for a real model, and two steps on a tiny one."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
from agent_runs import launch, read_metrics

from rollcast import compose
from rollcast_agents.records import load_records, record_path
from rollcast_data.contract import preprocessors
from rollcast_data.files import read_rows
from rollcast_data.preprocess.gsm8k import TOOL_INSTRUCTION
from rollcast_testing.tiny import CHAT_TEMPLATE, tiny_model_folder
from rollcast_trainer.run.settings import check_run

pytestmark = pytest.mark.long
SMALL = [
    "data.train_batch_size=2",
    "data.val_max_samples=2",
    "rollout.n=2",
    "actor.ppo_mini_batch_size=2",
    "actor.entropy_coeff=0.01",
    "actor.engine.param_dtype=null",
    "agent.max_response_length=8",
    "trainer.total_steps=2",
    "trainer.test_freq=2",
    "runtime=local",
    "runtime.threads_per_worker=1",
    "trackers=[jsonl]",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_model_folder(tmp_path_factory.mktemp("model") / "tiny", hidden=32, chat_template=CHAT_TEMPLATE)
    # A character is a token, so prompts are longer than those of a real model.
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The preprocessed files: of the real rows where they are at hand, else of made-up ones."""
    beside = Path(__file__).resolve().parents[4] / "shared" / "data" / "gsm8k"
    given = Path(os.environ.get("ROLLCAST_GSM8K_DIR", beside))
    source = tmp_path_factory.mktemp("raw")
    for split in ("train", "test"):
        file = given / f"{split}.jsonl"
        lines = file.read_text().splitlines()[:20] if file.is_file() else []
        rows = [json.loads(line) for line in lines] or [
            {"question": f"What is {n} and {n}?", "answer": f"#### {2 * n}"} for n in range(20)
        ]
        (source / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = tmp_path_factory.mktemp("gsm8k")
    preprocessors.get("gsm8k_with_tool")().run(source, output)
    return output


def gsm8k(model: Path, data: Path, run_dir: Path, *changes: str) -> list[str]:
    files = [f"data.train_files=[{data / 'train.parquet'}]", f"data.val_files=[{data / 'test.parquet'}]"]
    return ["recipe=gsm8k_tool", f"model.path={model}", *files, f"run_dir={run_dir}", *changes]


def test_rows_ask_for_the_tool(data: Path) -> None:
    row = next(iter(read_rows(data / "train.parquet"))).values
    assert [message["role"] for message in row["prompt"]] == ["system", "user"]
    assert row["prompt"][0]["content"] == TOOL_INSTRUCTION
    assert row["prompt"][1]["content"] == row["extra_info"]["question"]


def test_gsm8k_with_a_tool_is_planned(model: Path, data: Path, tmp_path: Path) -> None:
    config = compose(gsm8k(model, data, tmp_path / "run")).config
    names = [place.name for place in check_run(config).places]
    assert "agent_rollout" in names
    assert "rollout" not in names


def test_gsm8k_with_a_tool_runs_two_steps(model: Path, data: Path, tmp_path: Path) -> None:
    sizes = ["data.max_prompt_length=800", "data.max_response_length=64"]
    launch(gsm8k(model, data, tmp_path / "run", *SMALL, *sizes))
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(math.isfinite(value) for row in rows for value in row.values())
    assert rows[1]["actor/grad_norm"] > 0
    records = list(load_records(record_path(tmp_path / "run", 2)))
    assert len({record.trajectory.rollout_id for record in records}) == 4
    assert all(record.task["ground_truth"] for record in records)
