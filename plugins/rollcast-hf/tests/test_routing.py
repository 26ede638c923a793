"""Experts recorded while sampling, against a plain forward pass over the finished rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_tools import make_prompts, run_all

from rollcast.contracts.rollout import SamplingParams
from rollcast.errors import CapabilityError
from rollcast_hf.model import load_model
from rollcast_hf.rollout import HfRollout
from rollcast_testing.tiny import tiny_model_folder


def choices(module: Any, ids: list[int]) -> torch.Tensor:
    """Experts of each token that is read, ``[tokens, layers, 2]``, sorted."""
    found: list[torch.Tensor] = []
    gates = [each for name, each in module.named_modules() if name.endswith("mlp.gate")]
    handles = [gate.register_forward_hook(lambda _gate, _inputs, output: found.append(output[2])) for gate in gates]
    try:
        with torch.no_grad():
            module(input_ids=torch.tensor([ids]))
    finally:
        for handle in handles:
            handle.remove()
    return torch.stack(found, 1).sort(-1).values


def test_the_experts_are_those_of_a_plain_pass(make_rollout: Callable[..., HfRollout], tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path / "mixture", hidden=32, experts=4)
    rollout = make_rollout(path=folder, enable_rollout_routing_replay=True)
    prompts = make_prompts(3)
    prompts.append(prompts[0])
    # Rows end one by one, so that the batch shrinks.
    sampling = [SamplingParams(max_tokens=size, n=2, ignore_eos=True) for size in (1, 3, 9, 4)]
    module = load_model(str(folder))
    for prompt, output in zip(prompts, run_all(rollout, prompts, sampling), strict=True):
        for sequence in output.sequences:
            routed = sequence.routed_experts
            assert routed is not None
            assert routed.shape == (len(prompt) + len(sequence.token_ids), 2, 2)
            assert (routed[-1] == -1).all()
            expected = choices(module, [*prompt, *sequence.token_ids][:-1])
            assert torch.equal(torch.from_numpy(routed[:-1]).long().sort(-1).values, expected)


def test_nothing_is_recorded_unless_asked(make_rollout: Callable[..., HfRollout], tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path / "mixture", hidden=32, experts=4)
    (output,) = run_all(make_rollout(path=folder), [[5, 6]], SamplingParams(max_tokens=2))
    assert output.sequences[0].routed_experts is None


def test_a_dense_model_has_no_routers(make_rollout: Callable[..., HfRollout]) -> None:
    rollout = make_rollout(enable_rollout_routing_replay=True)
    with pytest.raises(CapabilityError, match="has no routers"):
        run_all(rollout, [[5, 6]], SamplingParams(max_tokens=2))
