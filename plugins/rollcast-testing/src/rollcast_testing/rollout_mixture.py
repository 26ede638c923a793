"""Conformance tests of rollouts with a mixture of experts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from rollcast.contracts.rollout import BaseRollout, RolloutRequest, RolloutSequence, SamplingParams, rollouts
from rollcast.contracts.weights import checkpoint_tensors
from rollcast.errors import CapabilityError
from rollcast_testing.rollout_tools import (
    RolloutFixtures,
    generate_all,
    load_model,
    make_prompts,
    run_prompts,
    write_model,
)

__all__ = ["RolloutMixtures"]

_RECORD = {"enable_rollout_routing_replay": True}


class RolloutMixtures(RolloutFixtures):
    """Tests with a mixture of experts; part of :class:`~rollcast_testing.rollout.RolloutSuite`."""

    mixtures: ClassVar[bool] = True
    routing_config: ClassVar[Mapping[str, Any] | None] = {}

    def test_a_mixture_of_experts(self, tmp_path: Path) -> None:
        """Check log-probs and recorded experts of a mixture with a tied head, before and after a weight update."""
        if not self.mixtures:
            pytest.skip(f"{self.name} runs no mixtures of experts")
        records = rollouts.get(self.name).capabilities.routing_replay and self.routing_config is not None
        folder = write_model(tmp_path / "mixture", seed=0, experts=4)
        rollout = self.build_rollout(folder, **(self._recording() if records else {}))
        try:
            self._check_mixture(rollout, load_model(folder), records)
            other = load_model(write_model(tmp_path / "other", seed=1, experts=4))
            weights = checkpoint_tensors(other, other.state_dict(keep_vars=True))
            named = [(name, weight.detach()) for name, weight in weights.items()]
            half = len(named) // 2
            asyncio.run(rollout.update_weights([named[:half], named[half:]], 3))
            self._check_mixture(rollout, other, records)
        finally:
            rollout.close()

    def test_experts_of_a_dense_model(self, model_folder: Path) -> None:
        """Check that recording is refused for a model without experts; the message names the key."""
        if not rollouts.get(self.name).capabilities.routing_replay or self.routing_config is None:
            pytest.skip("no experts are recorded here")
        with pytest.raises(CapabilityError, match=r"rollout\.enable_rollout_routing_replay is true, but the model"):
            self._run_and_close(model_folder)

    def _recording(self) -> dict[str, Any]:
        return {**(self.routing_config or {}), **_RECORD}

    def _run_and_close(self, folder: Path) -> None:
        rollout = self.build_rollout(folder, **self._recording())
        try:
            run_prompts(rollout, [[5, 6]], SamplingParams(max_tokens=2))
        finally:
            rollout.close()

    def _check_mixture(self, rollout: BaseRollout, module: Any, records: bool) -> None:
        prompts = make_prompts(4)
        prompts.append(prompts[1])  # in the prefix cache of a rollout that has one
        sampling = SamplingParams(n=2, ignore_eos=True)
        requests = [
            RolloutRequest(f"r{i}", prompt, replace(sampling, max_tokens=1 + 3 * i)) for i, prompt in enumerate(prompts)
        ]
        # Its sequences may end before the engine's last token.
        requests.append(RolloutRequest("stops", prompts[0], replace(sampling, max_tokens=32, stop=("e", "1", " "))))
        for request, output in zip(requests, generate_all(rollout, requests), strict=True):
            for sequence in output.sequences:
                self.check_log_probs(module, request.prompt_ids, sequence, request.sampling)
                if records:
                    _check_experts(module, request, sequence)


def _check_experts(module: Any, request: RolloutRequest, sequence: RolloutSequence) -> None:
    ids = [*request.prompt_ids, *sequence.token_ids]
    routed = sequence.routed_experts
    assert routed is not None, f"{request.request_id} has no routed_experts"
    assert routed.shape == (len(ids), 2, 2)
    assert str(routed.dtype) == "int16"
    expected = _choices(module, ids)
    read = torch.from_numpy(routed[:-1]).long().sort(-1).values
    assert torch.equal(read, expected[:-1]), f"{request.request_id} has the experts of other tokens"
    last = torch.from_numpy(routed[-1]).long().sort(-1).values
    assert bool((last == -1).all()) or torch.equal(last, expected[-1]), "the last token has other experts"


def _choices(module: Any, ids: Sequence[int]) -> Tensor:
    """Return the two experts of each token of a plain pass, sorted, ``[tokens, layers, 2]``."""
    with torch.no_grad():
        logits = module(input_ids=torch.tensor([list(ids)]), output_router_logits=True).router_logits
    return torch.stack([layer.topk(2).indices for layer in logits], 1).sort(-1).values
