"""Fixtures: models, and one engine for all tests that do not need their own."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the tools

from rollcast.contracts.rollout import rollouts
from rollcast_testing.rollout_tools import load_model, write_model
from rollcast_vllm.rollout import VllmRollout

# Changes nothing where the distribution is installed; from a source tree it stands in for that.
rollouts.register("vllm", VllmRollout)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of one shape."""
    root = tmp_path_factory.mktemp("models")
    return [write_model(root / f"model{seed}", seed=seed) for seed in (0, 1)]


@pytest.fixture(scope="session")
def models(folders: list[Path]) -> list[Any]:
    return [load_model(folder) for folder in folders]


@pytest.fixture(scope="session")
def shared(folders: list[Path]) -> Iterator[VllmRollout]:
    from vllm_tools import build

    rollout = build(folders[0], health_timeout_s=2.0)
    yield rollout
    rollout.close()


@pytest.fixture
def rollout(shared: VllmRollout, models: list[Any]) -> VllmRollout:
    """The shared engine, with the first model's weights as version 0."""
    asyncio.run(shared.update_weights([list(models[0].named_parameters())], 0))
    return shared
