"""One optimizer step of the real model on every engine: the same loss, gradient and log-probs."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from rollcast.config import compose
from rollcast.contracts.trainer import trainers

pytestmark = pytest.mark.long

FSDP = ["actor.engine.share_prompts=false"]
TWO = ["placement.n_gpus_per_node=2"]
STEPS = {
    "padded": FSDP,
    "packed": [*FSDP, "actor.engine.use_remove_padding=true"],
    "fused head": [*FSDP, "actor.engine.use_fused_kernels=true"],
    "two ranks": [*FSDP, *TWO],
    "two ranks, one copy each": [*FSDP, *TWO, "actor.engine.fsdp_size=1"],
    "Megatron": ["engine=megatron"],
    # The model has nine attention heads.
    "Megatron, TP 3": ["engine=megatron", "placement.n_gpus_per_node=3", "actor.engine.tensor_model_parallel_size=3"],
    "Megatron, PP 2": ["engine=megatron", *TWO, "actor.engine.pipeline_model_parallel_size=2"],
}


@pytest.fixture(scope="module")
def step(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Metrics of one step, by the overrides that it is made with."""

    @cache
    def run(*changes: str) -> dict[str, float]:
        run_dir = tmp_path_factory.mktemp("run")
        config = compose(
            [
                "recipe=smollm_words",
                f"run_dir={run_dir}",
                "runtime.threads_per_worker=1",
                "trackers=[jsonl]",
                "data.train_batch_size=4",
                "actor.ppo_mini_batch_size=4",
                "trainer.total_steps=1",
                "trainer.save_freq=-1",
                "trainer.export=false",
                "trainer.val_before_train=false",
                "trainer.test_freq=-1",
                *changes,
            ]
        ).config
        trainers.get(config.trainer.name).launch(config)
        return dict(json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1]))

    return run


@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_that_of_one_rank(step: Any, name: str) -> None:
    expected, found = step(), step(*STEPS[name])
    assert expected["reward/mean"] > 0
    assert found["reward/mean"] == expected["reward/mean"]  # the samples are the same
    for metric in ("actor/grad_norm", "actor/pg_loss", "actor/entropy"):
        assert found[metric] == pytest.approx(expected[metric], rel=1e-4, abs=1e-6), metric
    assert found["rollout/logprob_gap_max"] <= 1e-4
