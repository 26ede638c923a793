"""Fixtures: a tiny model, an engine that is nothing but a module, and rollouts over both."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parent))  # the tools

from hf_tools import EOS, ModuleEngine, roughen

from rollcast.contracts.rollout import RolloutSetup, rollouts
from rollcast_hf.rollout import HfRollout
from rollcast_hf.schemas import HfRolloutConfig
from rollcast_testing.tiny import tiny_model_folder

# Changes nothing where the distribution is installed; from a source tree it stands in for that.
rollouts.register("hf", HfRollout)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_model_folder(tmp_path_factory.mktemp("model") / "tiny")
    model = AutoModelForCausalLM.from_pretrained(folder)
    roughen(model)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def model(model_folder: Path) -> Any:
    module: Any = AutoModelForCausalLM.from_pretrained(model_folder)
    return module.eval()


@pytest.fixture
def engine(model: Any) -> ModuleEngine:
    return ModuleEngine(model)


@pytest.fixture
def make_rollout(model_folder: Path) -> Callable[..., HfRollout]:
    def make(seed: int = 3, path: Path | None = None, **config: Any) -> HfRollout:
        return HfRollout(RolloutSetup(HfRolloutConfig(**config), str(path or model_folder), seed, 0, EOS))

    return make


@pytest.fixture
def rollout(make_rollout: Callable[..., HfRollout], engine: ModuleEngine) -> HfRollout:
    """Bound to the engine, as version 1."""
    made = make_rollout()
    made.bind_engine(engine, 1)  # type: ignore[arg-type]
    return made
