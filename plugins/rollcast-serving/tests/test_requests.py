"""Requests that a model or a rollout cannot serve."""

from __future__ import annotations

import pytest

from rollcast.contracts.rollout import RolloutCapabilities, RolloutRequest, SamplingParams
from rollcast.errors import CapabilityError, RequestError
from rollcast_serving.requests import ModelLimits, check_request

LIMITS = ModelLimits(vocab_size=10, max_positions=20)


def test_a_prompt_comes_back_as_an_array() -> None:
    assert check_request(RolloutRequest("r", [1, 9], SamplingParams(max_tokens=18)), LIMITS).tolist() == [1, 9]


def test_multi_modal_data_needs_the_capability() -> None:
    request = RolloutRequest("r", [1], SamplingParams(), multi_modal_data={"video": [], "image": []})
    message = r"request 'r' carries multi_modal_data \(image, video\), but this rollout takes token ids only"
    for capabilities in (None, RolloutCapabilities()):
        with pytest.raises(CapabilityError, match=message):
            check_request(request, LIMITS, capabilities)
    assert check_request(request, LIMITS, RolloutCapabilities(multi_modal=True)).tolist() == [1]
    assert check_request(RolloutRequest("r", [1], SamplingParams(), multi_modal_data={}), LIMITS).tolist() == [1]


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ([], 1, "request 'r': the prompt is empty"),
        ([3, 10], 1, "token id 10 at prompt position 1 is not in the vocabulary of 10 tokens"),
        ([1] * 5, 16, r"need 21 positions; the model has 20 \(max_position_embeddings\)"),
        (["x"], 1, "prompt_ids are not token ids"),
        ([1], 0, "max_tokens is 0"),
    ],
)
def test_requests_that_do_not_fit(prompt: list[int], max_tokens: int, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        check_request(RolloutRequest("r", prompt, SamplingParams(max_tokens=max_tokens)), LIMITS)
