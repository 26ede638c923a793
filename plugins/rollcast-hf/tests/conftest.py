"""Fixtures: a tiny model, an engine that is nothing but a module, and rollouts over both."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollcast.contracts.engine import EngineCapabilities
from rollcast.contracts.rollout import RolloutOutput, RolloutRequest, RolloutSetup, SamplingParams, rollouts
from rollcast.testing.tiny import tiny_model_folder
from rollcast_hf.rollout import HfRollout
from rollcast_hf.schemas import HfRolloutConfig

# Changes nothing where the distribution is installed; from a source tree it stands in for that.
rollouts.register("hf", HfRollout)

EOS = 2


class ModuleEngine:
    """The part of an engine that an in-process rollout touches."""

    capabilities = EngineCapabilities(in_process_module=True)

    def __init__(self, module: Any) -> None:
        self.module = module
        self.entered = 0

    @contextmanager
    def in_process_module(self) -> Iterator[Any]:
        self.entered += 1
        yield self.module


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


def roughen(model: Any) -> None:
    """Add large random weights: a freshly initialised tied model only repeats its last token."""
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)


def make_prompts(count: int, longest: int = 20, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(4, 80, (length,), generator=generator).tolist() for length in lengths]


def run_all(
    rollout: HfRollout, prompts: Sequence[Sequence[int]], sampling: SamplingParams | Sequence[SamplingParams]
) -> list[RolloutOutput]:
    """All prompts at once; one sampling for all, or one each."""
    each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling

    async def gather() -> list[RolloutOutput]:
        requests = [RolloutRequest(f"r{i}", p, s) for i, (p, s) in enumerate(zip(prompts, each, strict=True))]
        return list(await asyncio.gather(*(rollout.generate(request) for request in requests)))

    return asyncio.run(gather())


def tokens_of(outputs: Sequence[RolloutOutput]) -> list[list[int]]:
    return [list(sequence.token_ids) for output in outputs for sequence in output.sequences]
