"""Conformance tests of rollouts that record the choices of a mixture's routers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from rollcast.contracts.rollout import RolloutRequest, SamplingParams, rollouts
from rollcast.errors import CapabilityError
from rollcast_testing.rollout_tools import RolloutFixtures, generate_all, load_model, make_prompts, run_prompts
from rollcast_testing.tiny import tiny_model_folder

__all__ = ["RolloutRouting"]

_RECORD = {"enable_rollout_routing_replay": True}


class RolloutRouting(RolloutFixtures):
    """Tests of recorded experts; part of :class:`~rollcast_testing.rollout.RolloutSuite`."""

    routing_config: ClassVar[Mapping[str, Any] | None] = {}

    def test_experts_of_a_mixture(self, tmp_path: Path) -> None:
        """Check that the recorded experts of each token that is read are those of transformers."""
        keys = self._keys()
        folder = tiny_model_folder(tmp_path / "mixture", head_dim=32, experts=4)
        module = load_model(folder)
        prompts = make_prompts(4)
        prompts.append(prompts[1])  # in the prefix cache of a rollout that has one
        sampling = SamplingParams(n=2, ignore_eos=True)
        requests = [
            RolloutRequest(f"r{i}", prompt, replace(sampling, max_tokens=1 + 3 * i)) for i, prompt in enumerate(prompts)
        ]
        # Ends sequences before the engine's last token.
        requests.append(RolloutRequest("stops", prompts[0], replace(sampling, max_tokens=32, stop=("e", "1", " "))))
        rollout = self.build_rollout(folder, **keys)
        try:
            outputs = generate_all(rollout, requests)
        finally:
            rollout.close()
        for request, output in zip(requests, outputs, strict=True):
            for sequence in output.sequences:
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

    def test_experts_of_a_dense_model(self, model_folder: Path) -> None:
        """Check that recording is refused for a model without experts; the message names the key."""
        keys = self._keys()
        with pytest.raises(CapabilityError, match="enable_rollout_routing_replay"):
            self._run_and_close(model_folder, keys)

    def _keys(self) -> dict[str, Any]:
        if not rollouts.get(self.name).capabilities.routing_replay:
            pytest.skip("capabilities.routing_replay is False")
        if self.routing_config is None:
            pytest.skip(f"{self.name} records no experts on this machine")
        return {**self.routing_config, **_RECORD}

    def _run_and_close(self, folder: Path, keys: Mapping[str, Any]) -> None:
        rollout = self.build_rollout(folder, **keys)
        try:
            run_prompts(rollout, [[5, 6]], SamplingParams(max_tokens=2))
        finally:
            rollout.close()


def _choices(module: Any, ids: Sequence[int]) -> Tensor:
    """Return the two experts of each token of a plain pass, sorted, ``[tokens, layers, 2]``."""
    with torch.no_grad():
        logits = module(input_ids=torch.tensor([list(ids)]), output_router_logits=True).router_logits
    return torch.stack([layer.topk(2).indices for layer in logits], 1).sort(-1).values
