"""A tiny model folder, whose tokenizer the scorer's tests need."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollcast_testing.tiny import tiny_model_folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp("model") / "tiny", hidden=32)
