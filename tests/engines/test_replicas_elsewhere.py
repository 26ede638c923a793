"""A trainer here, and an inference engine in a virtual environment of its own.

Run by the sessions ``tests_vllm`` and ``tests_sglang``, which set ``ROLLCAST_ROLLOUT`` to the rollout's name
and ``ROLLCAST_REPLICA_PYTHON`` to the interpreter of the engine's environment.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROLLOUT = os.environ.get("ROLLCAST_ROLLOUT", "")
PYTHON = os.environ.get("ROLLCAST_REPLICA_PYTHON", "")
pytestmark = pytest.mark.skipif(not (ROLLOUT and PYTHON), reason="no environment with an engine was named")


#: An adapter that trains, and so travels alone; a random model has no reward, but the bonus for entropy moves it.
LORA = ("model.lora_rank=8", "model.lora_alpha=32", "actor.optim.lr=1e-2", "actor.entropy_coeff=1.0")


def train(folder: Path, recipe: str, *changes: str) -> list[dict[str, float]]:
    """Train two steps with replicas in the engine's environment; return the rows of metrics."""
    assert importlib.util.find_spec(ROLLOUT) is None, "the trainer's environment has the engine too"
    command = [
        *(sys.executable, "-m", "rollcast", "train", f"recipe={recipe}", f"run_dir={folder / 'run'}"),
        *(f"rollout={ROLLOUT}", f"rollout.replica.python={PYTHON}", "rollout.weight_sync=shared_memory"),
        *("rollout.mode=colocated", "rollout.n=4", "data.train_batch_size=8", "actor.ppo_mini_batch_size=4"),
        *("trainer.warm_start=null", "model.random_init=true", "data.val_max_samples=16", "trainer.test_freq=2"),
        *("trainer.total_steps=2", "trainer.save_freq=-1", "trainer.export=false", "runtime=local"),
        *changes,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    log = folder / "run" / "logs" / "replica_0.log"
    assert done.returncode == 0, done.stderr[-4000:] + (log.read_text()[-4000:] if log.exists() else "")
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.skipif(ROLLOUT != "vllm", reason=f"rollout={ROLLOUT} takes no images")
def test_training_with_images_across_environments(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    rows = train(tmp_path, "quickstart_images", "actor.entropy_coeff=1.0")
    steps = [row for row in rows if "reward/mean" in row]
    assert [row["rollout/weight_version"] for row in steps] == [1, 2]
    for row in steps:
        assert row["rollout/logprob_gap_max"] < 1e-3
        assert row["sync/canary_gap"] < 1e-3
        assert row["actor/grad_norm"] > 0
    assert rows[-1]["val/samples"] == 16


MEGATRON = ("engine=megatron",)
ON_RAY = ("runtime=ray", "runtime.threads_per_worker=1")
STANDALONE = ("rollout.mode=standalone", "placement.pools={rollouts: [1]}", "placement.mapping={rollout: rollouts}")
#: Engine, mode and runtime.
PAIRS = {
    "FSDP, standalone, ahead, Ray": (*STANDALONE, *ON_RAY, "trainer.max_staleness=1"),
    "Megatron, colocated": MEGATRON,
    "FSDP, hybrid": ("rollout.mode=hybrid",),
    "Megatron, hybrid, Ray": (*MEGATRON, *ON_RAY, "rollout.mode=hybrid"),
    "Megatron, standalone, Ray": (*MEGATRON, *STANDALONE, *ON_RAY),
    "Megatron, standalone, ahead": (*MEGATRON, *STANDALONE, *ON_RAY, "trainer.max_staleness=1"),
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", PAIRS)
def test_every_engine_trains_in_every_mode(tmp_path: Path, name: str) -> None:
    rows = train(tmp_path, "quickstart", "actor.entropy_coeff=1.0", *PAIRS[name])
    steps = [row for row in rows if "reward/mean" in row]
    assert [row["step"] for row in steps] == [1, 2]
    for row in steps:
        # Samples that were generated ahead are of the weights before the last update.
        assert "ahead" in name or row["rollout/logprob_gap_max"] < 1e-3
        assert row["sync/canary_gap"] < 1e-3
        assert row["actor/grad_norm"] > 0
    assert rows[-1]["val/samples"] == 16


@pytest.mark.parametrize(
    "changes", [pytest.param((), id="whole", marks=pytest.mark.exhaustive), pytest.param(LORA, id="adapter")]
)
def test_training_across_environments(tmp_path: Path, changes: tuple[str, ...]) -> None:
    if changes:
        pytest.importorskip("peft")
    rows = train(tmp_path, "quickstart", *changes)
    steps = [row for row in rows if "reward/mean" in row]
    assert [row["rollout/weight_version"] for row in steps] == [1, 2]
    for row in steps:
        assert row["rollout/logprob_gap_max"] < 1e-3
        assert row["sync/canary_gap"] < 1e-3
        assert not changes or row["actor/grad_norm"] > 0
    assert rows[-1]["val/samples"] == 16
