"""The real model, for the tests that need it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rollcast.config import compose
from rollcast.contracts.engine import ModelConfig
from rollcast.contracts.storage import NodeCopies
from rollcast.contracts.trainer import trainers
from rollcast.errors import DataError
from rollcast_smollm.task import MODEL_INSTALLATION, find_model

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def gguf() -> Path:
    """The file of SmolLM2-135M-Instruct."""
    try:
        return find_model()
    except DataError:
        pytest.skip(f"needs the model: {MODEL_INSTALLATION}")


@pytest.fixture(scope="session")
def model(gguf: Path) -> Path:
    """The model as a Hugging Face folder, converted once for this machine."""
    return Path(NodeCopies().place(ModelConfig(path=str(gguf)), "model").path)


@pytest.fixture(scope="session")
def one_step(gguf: Path) -> Callable[..., dict[str, float]]:
    """A function that trains one step in a folder, with overrides, and returns its metrics."""

    def run(folder: Path, *changes: str) -> dict[str, float]:
        config = compose(
            [
                "recipe=smollm_words",
                f"run_dir={folder}",
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
        return dict(json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1]))

    return run
