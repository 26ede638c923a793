"""The real model in an inference engine of an environment of its own: its tokens, its log-probs, and what it trains.

Run by the sessions ``tests_vllm`` and ``tests_sglang`` with ``ROLLCAST_ALL_CASES=1``; see
``tests/engines/test_replicas_elsewhere.py``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollcast_smollm.task import SmolLMWords

ROLLOUT = os.environ.get("ROLLCAST_ROLLOUT", "")
PYTHON = os.environ.get("ROLLCAST_REPLICA_PYTHON", "")
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not (ROLLOUT and PYTHON), reason="no environment with an engine was named"),
]
REPLICAS = [f"rollout={ROLLOUT}", f"rollout.replica.python={PYTHON}"]
PROMPTS = 64
LORA = ["model.lora_rank=8", "model.lora_alpha=16", "actor.optim.lr=1e-3"]


def rollcast(*arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", "rollcast", *arguments], capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr[-4000:]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def answers(folder: Path, prompts: Path, model: Path, name: str, *overrides: str) -> list[str]:
    """What ``rollcast generate`` answers to the first prompts of a file."""
    output, some = folder / f"{name}.jsonl", folder / "prompts.jsonl"
    some.write_text("".join(prompts.read_text().splitlines(keepends=True)[:PROMPTS]))
    rollcast(
        *("generate", str(some), str(output), f"model.path={model}"),
        *("data.max_prompt_length=128", "data.max_response_length=24", "runtime=local", *overrides),
    )
    return [row["response"] for row in lines(output)]


def test_greedy_answers_are_those_of_transformers(model: Path, tmp_path: Path) -> None:
    """All prompts of the task begin with the same tokens, and the engine's prefix cache is on."""
    SmolLMWords().run(None, tmp_path / "task")
    prompts = tmp_path / "task" / "test.jsonl"
    greedy = ["rollout.temperature=0"]
    expected = answers(tmp_path, prompts, model, "hf", "rollout=hf", "rollout.n=1", *greedy)
    found = answers(tmp_path, prompts, model, ROLLOUT, *REPLICAS, "rollout.n=2", *greedy)
    assert len(set(expected)) > PROMPTS // 4
    assert found[::2] == found[1::2] == expected


@pytest.mark.parametrize("changes", [[], LORA], ids=["whole", "adapter"])
def test_the_trained_model_is_the_engines(model: Path, tmp_path: Path, changes: list[str]) -> None:
    run = tmp_path / "run"
    rollcast(
        *("train", "recipe=smollm_words", f"run_dir={run}", "runtime=local", "runtime.threads_per_worker=1"),
        *REPLICAS,
        *("rollout.mode=colocated", "rollout.weight_sync=shared_memory", "data.val_max_samples=16"),
        *("trainer.total_steps=3", "trainer.test_freq=3", "trainer.val_before_train=false"),
        *("data.train_batch_size=4", "actor.ppo_mini_batch_size=4"),
        *changes,
    )
    steps = [row for row in lines(run / "metrics.jsonl") if "reward/mean" in row]
    assert [row["rollout/weight_version"] for row in steps] == [1, 2, 3]
    for row in steps:
        assert row["rollout/logprob_gap_max"] <= 1e-4
        assert row["sync/canary_gap"] <= 1e-3
    if not changes:
        # Another process of the engine opens the folder that the run exports.
        prompts = run / "task" / "test.jsonl"
        of_ours, of_theirs = (
            answers(tmp_path, prompts, run / "export", name, *overrides, "rollout.n=1", "rollout.temperature=0")
            for name, overrides in (("ours", ["rollout=hf"]), ("theirs", REPLICAS))
        )
        assert of_theirs == of_ours
