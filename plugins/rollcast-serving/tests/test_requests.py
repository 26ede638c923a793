"""Requests that a model or a rollout cannot serve."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollcast.contracts.rollout import RolloutCapabilities, RolloutRequest, SamplingParams
from rollcast.contracts.sections import RolloutConfig
from rollcast.errors import CapabilityError, ConfigError, RequestError
from rollcast_serving.requests import (
    OPTIONAL_SAMPLING,
    ModelLimits,
    check_request,
    check_token_ids,
    configured_sampling,
    cut_keys,
    fit_request,
)

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


@pytest.mark.parametrize("change", [{"min_p": 0.1}, {"repetition_penalty": 1.2}, {"logit_bias": ((3, 1.0),)}])
def test_optional_sampling_needs_the_capability(change: dict[str, Any]) -> None:
    (name,) = change
    request = RolloutRequest("r", [1], SamplingParams(max_tokens=2, **change))
    with pytest.raises(CapabilityError, match=rf"request 'r' sets {name}=.* \(capabilities.sampling: top_a\)"):
        check_request(request, LIMITS, RolloutCapabilities(sampling=frozenset({"top_a"})))
    assert check_request(request, LIMITS, RolloutCapabilities(sampling=frozenset({name}))).tolist() == [1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"logit_bias": ((10, 1.0),)}, "logit_bias names token id 10"),
        ({"logit_bias": ((1, 101.0),)}, "logit_bias of token id 1 is 101.0"),
        ({"logit_bias": ((1, float("nan")),)}, "logit_bias of token id 1 is nan"),
    ],
)
def test_optional_sampling_out_of_range(change: dict[str, Any], message: str) -> None:
    request = RolloutRequest("r", [1], SamplingParams(max_tokens=2, **change))
    with pytest.raises(RequestError, match=message):
        check_request(request, LIMITS, RolloutCapabilities(sampling=OPTIONAL_SAMPLING))


def test_fit_request() -> None:
    request = RolloutRequest("r", [1] * 15, SamplingParams(max_tokens=9))
    assert fit_request(request, LIMITS, "refuse") is request
    assert fit_request(request, LIMITS, "clamp").sampling.max_tokens == 5
    assert fit_request(replace(request, prompt_ids=[1] * 11), LIMITS, "clamp").sampling.max_tokens == 9
    none_left = replace(request, prompt_ids=[1] * 20)
    assert fit_request(none_left, LIMITS, "clamp") is none_left
    assert fit_request(request, replace(LIMITS, max_positions=None), "clamp") is request


def test_the_section_says_what_is_sampled() -> None:
    section = RolloutConfig(
        temperature=0.5, min_p=0.1, logit_bias={9: 1, 3: -2.0}, stop=["\n\n"], stop_token_ids=[4], ignore_eos=True
    )
    training = configured_sampling(section, 7)
    assert (training.temperature, training.min_p, training.max_tokens) == (0.5, 0.1, 7)
    assert training.logit_bias == ((3, -2.0), (9, 1.0))
    assert (training.stop, training.stop_token_ids, training.ignore_eos) == (("\n\n",), (4,), True)
    validation = configured_sampling(section, 7, validation=True)
    assert (validation.temperature, validation.min_p) == (0.0, 0.0)
    assert (validation.stop, validation.logit_bias) == (training.stop, training.logit_bias)
    assert cut_keys(training) == ["min_p", "logit_bias"]
    assert cut_keys(SamplingParams(temperature=0.3, stop=("x",), max_tokens=3)) == []
    assert cut_keys(SamplingParams(top_p=0.9, top_k=5)) == ["top_p", "top_k"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"stop_token_ids": [3, 9]},
            r"judge\.rollout\.stop_token_ids names token id 9, and the vocabulary has 9 tokens",
        ),
        ({"stop_token_ids": [-1]}, r"stop_token_ids names token id -1"),
        ({"logit_bias": {40: 1.0}}, r"logit_bias names token id 40"),
        ({"stop_token_ids": [0, 8], "logit_bias": {8: 1.0}}, None),
    ],
)
def test_ids_outside_the_vocabulary_are_named_before_the_start(
    tmp_path: Path, changes: dict[str, Any], words: str | None
) -> None:
    rollout = RolloutConfig(**changes)
    for config in ({"vocab_size": 9}, {"vocab_size": 99, "text_config": {"vocab_size": 9}}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        with nullcontext() if words is None else pytest.raises(ConfigError, match=words):
            check_token_ids(rollout, str(tmp_path), "judge.rollout")
    (tmp_path / "config.json").write_text("{")
    check_token_ids(rollout, str(tmp_path))
    check_token_ids(rollout, "/no/such/model")
