"""Fixtures: tiny model folders, and processes that stay up for all tests of several ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # the scenarios, here and in the spawned ranks

from rollcast_testing.ranks import Ranks, shared_ranks
from rollcast_testing.tiny import tiny_model_folder

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ranks() -> Ranks:
    return shared_ranks()


@pytest.fixture(scope="module", autouse=True)
def _ranks_of_this_module() -> Iterator[None]:
    yield
    shared_ranks().close()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp("model") / "tied")


@pytest.fixture(scope="session")
def untied_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp("model") / "untied", tied=False)
