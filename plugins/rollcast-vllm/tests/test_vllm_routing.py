"""Experts in vLLM's answers; which experts they are is checked on a GPU by the conformance suite."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rollcast.contracts.rollout import RolloutRequest, SamplingParams
from rollcast.errors import RolloutError
from rollcast_serving.engines.routing import RecordedLayers
from rollcast_vllm.sampling import SequenceReader, read_sequence

outputs = pytest.importorskip("vllm.outputs")
if not hasattr(outputs, "WeightVersionSpan"):
    pytest.skip("vLLM before 0.32 states no weight versions, which these outputs have", allow_module_level=True)

#: The second and the fourth of four layers have experts.
LAYERS = RecordedLayers((1, 3), 4)
REQUEST = RolloutRequest("r", [5, 6, 7], SamplingParams(max_tokens=4))


def completion(tokens: Sequence[int], experts: np.ndarray | None, reason: str | None = "length") -> Any:
    from vllm.logprobs import FlatLogprobs

    log_probs = FlatLogprobs()
    for token in tokens:
        log_probs.append_fast([token], [-1.0], itertools.repeat(1), [None])
    spans = [outputs.WeightVersionSpan(version="3", start=0, end=len(tokens))] if reason else None
    return outputs.CompletionOutput(
        index=0,
        text="",
        token_ids=list(tokens),
        cumulative_logprob=None,
        logprobs=log_probs,
        routed_experts=experts,
        finish_reason=reason,
        weight_versions=spans,
    )


def every_expert(tokens: int) -> np.ndarray:
    return np.arange(tokens * 4 * 2, dtype=np.uint8).reshape(tokens, 4, 2)


def test_only_layers_with_experts_are_kept() -> None:
    sequence = read_sequence(REQUEST, completion([1, 2, 3, 4], every_expert(6)), LAYERS)
    assert sequence.token_ids == array("i", [1, 2, 3, 4])
    assert sequence.routed_experts is not None
    assert sequence.routed_experts.dtype == np.int16
    assert np.array_equal(sequence.routed_experts[:6], every_expert(6)[:, [1, 3]])
    assert (sequence.routed_experts[6] == -1).all()


def test_experts_of_a_sequence_that_a_stop_string_ends() -> None:
    class Third:
        seen = 0

        def add(self, _token: int) -> bool:
            self.seen += 1
            return self.seen == 2

    reader = SequenceReader(REQUEST, Third(), LAYERS)  # type: ignore[arg-type]
    reader.add(completion([1, 2, 3, 4], every_expert(6)))
    routed = reader.sequence().routed_experts
    assert np.array_equal(routed, every_expert(6)[:5, [1, 3]])


def test_missing_experts_are_an_error() -> None:
    with pytest.raises(RolloutError, match="'r': vLLM returned no experts for its 5 tokens"):
        read_sequence(REQUEST, completion([1, 2], None), LAYERS)
    with pytest.raises(RolloutError, match=r"'r': the engine returned experts of shape \(3, 4, 2\) for 5 tokens"):
        read_sequence(REQUEST, completion([1, 2], every_expert(3)), LAYERS)
    assert read_sequence(REQUEST, completion([1, 2], None)).routed_experts is None
