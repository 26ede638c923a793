"""What the tests share: rollouts, weights that go by pickle, and sequences checked token by token."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rollcast.contracts.rollout import (
    EngineNode,
    EnginePart,
    RolloutRequest,
    RolloutSequence,
    RolloutSetup,
    SamplingParams,
)
from rollcast.contracts.weights import WeightBucket
from rollcast.protocol import tensor_checksum
from rollcast_testing.rollout_tools import EOS, PAD, token_log_probs
from rollcast_vllm.rollout import VllmRollout
from rollcast_vllm.schemas import VllmRolloutConfig

LONG = SamplingParams(max_tokens=400, ignore_eos=True)
SHORT = RolloutRequest("short", [7, 8], SamplingParams(max_tokens=8, ignore_eos=True))
TOLERANCE = 1e-4


def build(folder: Path, node: EngineNode | None = None, **keys: Any) -> VllmRollout:
    return VllmRollout(_setup(str(folder), node or EngineNode(), keys))


def build_part(folder: str, port: int, **keys: Any) -> EnginePart:
    """Join an engine on two nodes as the second of them."""
    return VllmRollout.join(_setup(folder, EngineNode(1, 2, port=port), keys))


def _setup(folder: str, node: EngineNode, keys: dict[str, Any]) -> RolloutSetup:
    config = VllmRolloutConfig(**{"kv_cache_memory_bytes": 64 << 20, **keys})
    return RolloutSetup(config, folder, seed=3, pad_token_id=PAD, eos_token_id=EOS, node=node)


def kill(rollout: VllmRollout) -> None:
    for pid in rollout.process_ids:
        os.kill(pid, signal.SIGKILL)


class FolderBuckets:
    """Weights of a folder, read wherever it is gone through: an iterable that can be pickled."""

    def __init__(self, folder: Path, spoil: str = "") -> None:
        self.folder, self.spoil = folder, spoil
        self.made_in = os.getpid()

    def __iter__(self) -> Iterator[WeightBucket]:
        from safetensors.torch import load_file

        if os.getpid() == self.made_in:
            raise AssertionError("the buckets were gone through in the trainer's process")
        named = list(load_file(self.folder / "model.safetensors").items())
        for start in range(0, len(named), 5):
            part = named[start : start + 5]
            expected = {name: "0" if name == self.spoil else tensor_checksum(tensor) for name, tensor in part}
            yield WeightBucket(part, expected)


def gap_to(models: dict[int, Any], prompt: Sequence[int], sequence: RolloutSequence) -> float:
    """How far the log-probs are from those of the models that their versions name; sampled at temperature 1."""
    expected = {
        version: token_log_probs(model, prompt, sequence.token_ids, SamplingParams())
        for version, model in models.items()
    }
    return max(
        abs(expected[version][place] - log_prob)
        for place, (version, log_prob) in enumerate(zip(sequence.weight_versions, sequence.log_probs, strict=True))
    )


def require_versions(rollout: VllmRollout) -> None:
    """Skip where vLLM gets no updates while requests are in flight."""
    if not rollout.capabilities.update_in_flight:
        pytest.skip("vLLM before 0.32 states no weight versions")


async def under_way(rollout: VllmRollout, prompts: Sequence[Sequence[int]]) -> list[asyncio.Task[Any]]:
    """Long requests, computed already when this returns."""
    tasks = [
        asyncio.create_task(rollout.generate(RolloutRequest(f"long{i}", prompt, LONG)))
        for i, prompt in enumerate(prompts)
    ]
    await rollout.generate(SHORT)
    return tasks
