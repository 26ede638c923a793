"""What the tests share: an engine that is nothing but a module, prompts, and calls in bulk."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from rollcast.contracts.engine import EngineCapabilities
from rollcast.contracts.rollout import RolloutOutput, RolloutRequest, SamplingParams
from rollcast_hf.rollout import HfRollout

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
