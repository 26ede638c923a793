"""Fixtures: a tiny model that does not just repeat itself, and the small task around it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_tools import SmallTask

from rollcast.contracts.runtime import runtimes
from rollcast_testing.tiny import tiny_model_folder

__all__ = ["model_folder", "ray_is_up", "small_task"]


@pytest.fixture(scope="module")
def ray_is_up() -> Iterator[None]:
    """A Ray that the runs of a module find, so that it starts once."""
    runtime: Any = runtimes.get("ray")
    here = runtime(num_cpus=4)
    here.nodes()
    yield
    here.shutdown()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoModelForCausalLM

    folder = tiny_model_folder(tmp_path_factory.mktemp("model") / "tiny", hidden=32)
    model = AutoModelForCausalLM.from_pretrained(folder)
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def small_task(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> SmallTask:
    return SmallTask.make(tmp_path_factory.mktemp("task"), model_folder)
