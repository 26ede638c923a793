"""Fixtures: model folders of each family, and processes that stay up for all tests on two ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # the scenarios, here and in the spawned ranks

from megatron_models import family_folder

from rollcast_testing.ranks import Ranks, shared_ranks

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def two_ranks() -> Ranks:
    """Two, unless it is told otherwise."""
    return shared_ranks()


@pytest.fixture(scope="module", autouse=True)
def _ranks_of_this_module() -> Iterator[None]:
    yield
    shared_ranks().close()


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Gives a folder by family and tying, each written once."""
    made: dict[tuple[str, bool], Path] = {}

    def make(family: str = "qwen2", tied: bool = True) -> Path:
        if (family, tied) not in made:
            made[family, tied] = family_folder(tmp_path_factory.mktemp("model") / family, family, tied)
        return made[family, tied]

    return make
