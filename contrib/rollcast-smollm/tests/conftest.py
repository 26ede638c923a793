"""The real model, for the tests that need it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rollcast.contracts.engine import ModelConfig
from rollcast.contracts.storage import NodeCopies
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
